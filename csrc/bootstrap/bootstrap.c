// Bootstrap: one call for both sides of a join, rank 0's listener, and the session's tokens.
#include "bootstrap/bootstrap.h"

#include <errno.h>
#include <net/if.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/internal.h"

enum { SECRET_MIN = 16, BACKLOG = 1024, INTERFACES_MAX = 32 };

static int check_secret(const struct nb_boot_config *config, struct nb_error *err) {
    size_t bytes = config->secret != NULL ? config->secret_bytes : 0;
    if (bytes < SECRET_MIN || bytes > NB_SECRET_MAX) {
        return nb_fail(err, -EINVAL, "NETBOTTLENECK_SECRET must have %d to %d bytes; it has %zu", SECRET_MIN,
                       NB_SECRET_MAX, bytes);
    }
    return 0;
}

static int check_config(const struct nb_boot_config *config, struct nb_error *err) {
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size) {
        return nb_fail(err, -EINVAL, "rank %d of %d does not exist", config->rank, config->size);
    }
    if (config->tag != NULL && strlen(config->tag) > NB_WIRE_JOIN_TAG_MAX) {
        return nb_fail(err, -EINVAL, "a tag of %zu bytes: the limit is %d", strlen(config->tag), NB_WIRE_JOIN_TAG_MAX);
    }
    if (config->size == 1) {
        return 0;
    }
    if (config->timeout_ms <= 0) {
        return nb_fail(err, -EINVAL, "the time limit of %d ms must be positive", config->timeout_ms);
    }
    return check_secret(config, err);
}

static int host_to_address(const char *host, struct nb_sockaddr *addr, struct nb_error *err) {
    char text[NB_SOCK_TEXT];
    bool six = host[0] != '[' && strchr(host, ':') != NULL;
    int n = snprintf(text, sizeof text, six ? "[%s]:0" : "%s:0", host);
    if (n < 0 || (size_t)n >= sizeof text || nb_sock_parse(text, addr, NULL) != 0) {
        return nb_fail(err, -EINVAL, "'%.80s' is not an address to listen on: expected 10.0.0.1 or fd00::1", host);
    }
    return 0;
}

static int first_interface(const char *spec, struct nb_sockaddr *addr, struct nb_error *err) {
    struct nb_sockaddr addrs[INTERFACES_MAX];
    char names[INTERFACES_MAX][IF_NAMESIZE];
    int n = nb_sock_interfaces(spec, 0, addrs, names, INTERFACES_MAX, err);
    if (n < 0) {
        return n;
    }
    *addr = addrs[0];
    nb_sock_set_port(addr, 0);
    return 0;
}

int nb_listener_open(struct nb_listener *listener, const struct nb_boot_config *config, const char *address,
                     struct nb_error *err) {
    struct nb_sockaddr addr;
    int rc = check_secret(config, err);
    if (rc == 0) {
        rc = address != NULL ? host_to_address(address, &addr, err) : first_interface(config->ifname, &addr, err);
    }
    if (rc != 0) {
        return rc;
    }
    int fd = nb_sock_listen(&addr, config->ports, BACKLOG, err);
    if (fd < 0) {
        return fd;
    }
    listener->fd = fd;
    listener->addr = addr;
    return 0;
}

void nb_listener_close(struct nb_listener *listener) {
    if (listener != NULL && listener->addr.len != 0) { // zeroed memory: not a listener
        close(listener->fd);
        *listener = (struct nb_listener){.fd = -1};
    }
}

static int join_alone(struct nb_boot *boot, struct nb_error *err) {
    int rc = nb_random(boot->session, sizeof boot->session);
    if (rc != 0) {
        errno = -rc;
        return nb_fail(err, rc, "getrandom: %m");
    }
    boot->control = malloc(sizeof *boot->control);
    if (boot->control == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate memory for one rank");
    }
    boot->control[0] = -1;
    return nb_sock_parse("127.0.0.1:0", &boot->self, err);
}

int nb_boot_join(struct nb_boot *boot, const struct nb_boot_config *config, struct nb_listener *listener,
                 const char *address, struct nb_error *err) {
    struct nb_boot made = {
        .rank = config->rank, .size = config->size, .timeout_ms = config->timeout_ms, .interrupt = config->interrupt};
    int rc = check_config(config, err);
    if (rc != 0) {
        return rc;
    }
    if (config->size == 1) {
        rc = join_alone(&made, err);
    } else if (config->rank == 0) {
        rc = listener != NULL ? nb_join_server(&made, config, listener, err)
                              : nb_fail(err, -EINVAL, "rank 0 needs a listener");
    } else {
        rc = address != NULL ? nb_join_client(&made, config, address, err)
                             : nb_fail(err, -EINVAL, "rank %d needs the address of rank 0", config->rank);
    }
    if (rc == 0) {
        *boot = made;
    }
    return rc;
}

void nb_boot_close(struct nb_boot *boot) {
    if (boot == NULL || boot->control == NULL) {
        return;
    }
    int count = boot->rank == 0 ? boot->size : 1;
    for (int i = 0; i < count; i++) {
        if (boot->control[i] >= 0) {
            close(boot->control[i]);
        }
    }
    free(boot->control);
    boot->control = NULL;
    explicit_bzero(boot->session, sizeof boot->session);
}

void nb_boot_mac(const struct nb_boot *boot, const char *purpose, const void *data, size_t bytes,
                 unsigned char mac[NB_SHA256_BYTES]) {
    struct nb_hmac hmac;
    nb_hmac_init(&hmac, boot->session, sizeof boot->session);
    nb_hmac_add(&hmac, purpose, strlen(purpose) + 1);
    nb_hmac_add(&hmac, data, bytes);
    nb_hmac_final(&hmac, mac);
}

void nb_boot_token(const struct nb_boot *boot, const char *purpose, int from, int to,
                   unsigned char token[NB_TOKEN_BYTES]) {
    unsigned char digest[NB_SHA256_BYTES];
    uint32_t ranks[2] = {(uint32_t)from, (uint32_t)to};
    nb_boot_mac(boot, purpose, ranks, sizeof ranks, digest);
    memcpy(token, digest, NB_TOKEN_BYTES);
}
