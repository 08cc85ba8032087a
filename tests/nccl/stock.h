// NCCL's own network and its adapters for older plugins, loaded from a libnccl.so.2 without a GPU. Both are local
// symbols, found in the library's .symtab. Functions return NULL or false on failure; then `why` has the reason.
#ifndef NB_TEST_NCCL_STOCK_H
#define NB_TEST_NCCL_STOCK_H

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct stock {
    const char *path;
    uintptr_t base; // where the library is loaded
    const char *file;
    size_t bytes;
    char why[256];
};

static inline bool stock_open(struct stock *stock, const char *path) {
    struct link_map *map = NULL;
    struct stat status;
    *stock = (struct stock){.path = path};
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
        (void)snprintf(stock->why, sizeof stock->why, "cannot load it: %.200s", dlerror());
        return false;
    }
    stock->base = map->l_addr;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0) {
        (void)snprintf(stock->why, sizeof stock->why, "cannot read %.200s", path);
        return false;
    }
    stock->bytes = (size_t)status.st_size;
    void *file = mmap(NULL, stock->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    stock->file = file != MAP_FAILED ? file : NULL;
    if (stock->file == NULL || stock->bytes < sizeof(Elf64_Ehdr) || memcmp(stock->file, ELFMAG, SELFMAG) != 0) {
        (void)snprintf(stock->why, sizeof stock->why, "%.200s is not an ELF file", path);
        return false;
    }
    return true;
}

// Address of a symbol of the given size (0: any), local symbols included.
static inline void *stock_symbol(struct stock *stock, const char *name, size_t size) {
    const Elf64_Ehdr *head = (const void *)stock->file;
    const Elf64_Shdr *sections = (const void *)(stock->file + head->e_shoff);
    for (int s = 0; s < head->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) {
            continue;
        }
        const Elf64_Sym *symbols = (const void *)(stock->file + sections[s].sh_offset);
        const char *names = stock->file + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            if (strcmp(names + symbols[i].st_name, name) == 0 && (size == 0 || symbols[i].st_size == size)) {
                return (void *)(stock->base + symbols[i].st_value);
            }
        }
    }
    (void)snprintf(stock->why, sizeof stock->why, "%.120s has no symbol %s of the expected size", stock->path, name);
    return NULL;
}

// NCCL's Socket network, as a table of version 12. Its only CUDA call, cudaGetDevice, is replaced by code that returns
// device 0.
static inline const void *stock_socket(struct stock *stock) {
#if defined(__x86_64__)
    static const unsigned char device_0[] = {0xc7, 0x07, 0, 0, 0, 0, 0x31, 0xc0, 0xc3}; // *device = 0; return 0
    const void *table = stock_symbol(stock, "ncclNetSocket", 22 * sizeof(void *));
    void *code = table != NULL ? stock_symbol(stock, "cudaGetDevice", 0) : NULL;
    if (code == NULL) {
        return NULL;
    }
    uintptr_t page = (uintptr_t)code & ~(uintptr_t)4095;
    if (mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) {
        (void)snprintf(stock->why, sizeof stock->why, "cannot make its code writable: %m");
        return NULL;
    }
    memcpy(code, device_0, sizeof device_0);
    return table;
#else
    (void)snprintf(stock->why, sizeof stock->why, "cudaGetDevice is replaced on x86-64 only");
    return NULL;
#endif
}

// NCCL's view of a plugin's table of this version: through NCCL's adapter to version 12.
static inline const void *stock_adapted(struct stock *stock, void *plugin, int version) {
    char name[32];
    (void)snprintf(name, sizeof name, "_Z%dgetNcclNet_v%dPv", version < 10 ? 13 : 14, version);
    const void *(*adapter)(void *) = NULL;
    void *code = stock_symbol(stock, name, 0);
    memcpy(&adapter, &code, sizeof code);
    const void *table = adapter != NULL ? adapter(plugin) : NULL;
    if (adapter != NULL && table == NULL) {
        (void)snprintf(stock->why, sizeof stock->why, "NCCL rejects the plugin's table of version %d", version);
    }
    return table;
}

#endif
