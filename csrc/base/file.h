// File: extends a file without a signal that would kill the process.
#ifndef NB_BASE_FILE_H
#define NB_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>

// Makes an empty file `bytes` long: 0 or -errno. -EFBIG: also beyond the limit of this process on file sizes (ulimit
// -f), at which the kernel sends SIGXFSZ. reserve: allocates all blocks now, so that a full disk shows as an error here.
// After a failure the length is undefined.
int nb_file_extend(int fd, size_t bytes, bool reserve);

#endif
