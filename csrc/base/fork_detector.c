// Fork detector: detects a forked child by a page that the kernel wipes on fork.
#include "base/fork_detector.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096 }; // the rest of a larger page stays unused

void nb_fork_detector_open(struct nb_fork_detector *detector) {
    *detector = (struct nb_fork_detector){.pid = getpid()};
#ifdef MADV_WIPEONFORK
    unsigned char *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    if (madvise(page, PAGE_BYTES, MADV_WIPEONFORK) != 0) {
        (void)munmap(page, PAGE_BYTES);
        return;
    }
    *page = 1;
    detector->page = page;
#endif
}

void nb_fork_detector_close(struct nb_fork_detector *detector) {
    if (detector->page != NULL) {
        (void)munmap((void *)detector->page, PAGE_BYTES);
        detector->page = NULL;
    }
}
