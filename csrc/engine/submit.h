// Submissions: frees their state at the end of the job.
#ifndef NB_ENGINE_SUBMIT_H
#define NB_ENGINE_SUBMIT_H

struct nb_job;

void nb_submit_close(struct nb_job *job);

#endif
