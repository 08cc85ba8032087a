// Progress owner: decides which thread polls the lanes and control connections, and when it sleeps. The progress owner
// is the communication thread, or a caller that waits; it acts as the job's communication thread meanwhile.
//
// A caller takes progress over from a sleeping thread, which notices when it wakes. It asks a thread that is in a pass;
// that thread hands over after the pass. The thread resumes shortly after the last caller has left.
#ifndef NB_ENGINE_PROGRESS_OWNER_H
#define NB_ENGINE_PROGRESS_OWNER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"

enum { TICK_MS = 50 };

enum nb_progress_owner {
    NB_PROGRESS_THREAD,
    NB_PROGRESS_ASLEEP, // the thread sleeps
    NB_PROGRESS_CALLER,
    NB_PROGRESS_NONE
};

struct nb_progress {
    pthread_t thread;
    bool thread_runs;
    bool may_spin;        // each rank of this host has a core, so short waits may poll
    bool callers_may_own; // callers may own progress
    uint64_t float_mode;  // of the thread that opened the job: all operations compute in it
    // Fields of the progress owner.
    int64_t moved_ns;     // time of the last movement
    int64_t gap_ns;       // running mean of the time between movements
    int64_t next_tick_ns; // time of the next tick
    // Under the job's lock.
    int waiters;                 // threads inside nb_work_wait
    pthread_cond_t thread_wakes; // the thread waits here while a caller owns progress
    enum nb_progress_owner owner;
    _Atomic bool wanted; // a waiting caller asks for progress. Read without the lock too
    bool thread_due;     // work is pending that the thread should not leave to a future caller
    bool thread_sleeps;  // waits for a signal, without a timeout
    bool thread_polls;   // sleeps in the event loop
    uint64_t takeovers;  // how often a caller has taken progress over
    int64_t free_ns;     // when the thread resumes if no caller does
    _Atomic bool stop;   // read without the lock too
};

// Wakes the progress owner for an operation in the inbox, if needed. awaited: its caller waits for it at once. The
// caller holds the lock.
void nb_progress_notify(struct nb_job *job, size_t bytes, bool awaited);
// Asks the thread to end. The caller holds the lock.
void nb_progress_end(struct nb_job *job);
// For the thread, in a pass: sleeps, and waits while callers own progress.
void nb_progress_sleep(struct nb_job *job, int sleep_ms);
// For the thread, after a pass: hands progress to callers that wait, and waits until it is free again.
void nb_progress_hand_over(struct nb_job *job);

#endif
