// How does a forked child differ in memory? By a page that it has anew.
#include "base/origin.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096 }; // or the rest of a larger page

void nb_origin_open(struct nb_origin *origin) {
    *origin = (struct nb_origin){.pid = getpid()};
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
    origin->page = page;
#endif
}

void nb_origin_close(struct nb_origin *origin) {
    if (origin->page != NULL) {
        (void)munmap((void *)origin->page, PAGE_BYTES);
        origin->page = NULL;
    }
}
