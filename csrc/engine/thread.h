// Communication thread of a job.
#ifndef NB_ENGINE_THREAD_H
#define NB_ENGINE_THREAD_H

// Makes progress until the job stops.
void *nb_thread_main(void *job);

#endif
