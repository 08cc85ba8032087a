// Fuzzes the bootstrap with the bytes of a broken peer. The first byte selects the receiver. 0: rank 0's listener, raw
// bytes. 1: the same after a valid handshake for what the input claims. 2: a client, from a rank 0 that knows the
// secret. 3 and 4: an all-gather on rank 0 and on rank 1. 5: the clock exchange.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "bootstrap/internal.h"
#include "input.h"

enum { MODES = 6, TIMEOUT_MS = 4, LIMIT_NS = 500 * 1000 * 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const unsigned char secret[] = "sixteen bytes or more";

static struct nb_boot_config config_of(int rank) {
    struct nb_boot_config config = {.rank = rank, .size = 2, .timeout_ms = TIMEOUT_MS, .ifname = "=lo"};
    config.secret = secret;
    config.secret_bytes = sizeof secret;
    config.tag = "1/tcp";
    return config;
}

static int open_and_connect(struct nb_listener *listener, const struct nb_boot_config *config) {
    struct nb_error err = {0};
    if (nb_listener_open(listener, config, NULL, &err) < 0) {
        abort();
    }
    return nb_sock_connect(&listener->addr, NULL, NULL, &err);
}

struct client {
    struct input in;
    int fd;
    bool authenticates;
};

// The client: sends a hello with its proof, if requested, and then the input.
static void *client_main(void *arg) {
    struct client *client = arg;
    struct nb_boot_config config = config_of(1);
    int64_t until = nb_now_ns() + LIMIT_NS;
    if (client->authenticates) {
        struct nb_shake shake = {0};
        struct wire_join_proof proof;
        (void)nb_shake_hello(&shake, &config, NULL);
        take(&client->in, &shake.hello.rank, 12);
        take(&client->in, shake.hello.tag, sizeof shake.hello.tag);
        shake.hello.rank %= 4;
        shake.hello.size %= 4;
        shake.hello.tag_bytes %= 2 * NB_WIRE_JOIN_TAG_MAX;
        (void)nb_sock_write_all(client->fd, &shake.hello, sizeof shake.hello, until, NULL);
        if (nb_sock_read_all(client->fd, &shake.challenge, sizeof shake.challenge, until, NULL) == 0) {
            nb_shake_proof(&shake, &config, &proof);
            (void)nb_sock_write_all(client->fd, &proof, sizeof proof, until, NULL);
        }
    }
    (void)nb_sock_write_all(client->fd, client->in.data, client->in.bytes, until, NULL);
    (void)shutdown(client->fd, SHUT_WR);
    return NULL;
}

static void fuzz_rank_0(struct input in, bool authenticates) {
    struct nb_listener listener = {.fd = -1};
    struct nb_boot_config config = config_of(0);
    struct nb_boot boot = {0};
    struct nb_error err = {0};
    struct client client = {.in = in, .fd = open_and_connect(&listener, &config), .authenticates = authenticates};
    pthread_t thread;
    if (pthread_create(&thread, NULL, client_main, &client) != 0) {
        abort();
    }
    (void)nb_boot_join(&boot, &config, &listener, NULL, &err);
    pthread_join(thread, NULL);
    nb_boot_close(&boot);
    close(client.fd);
    nb_listener_close(&listener);
}

struct fake_rank_0 {
    struct input in;
    int fd;
};

// A rank 0 that knows the secret and sends the input as challenge and verdict.
static void *fake_rank_0_main(void *arg) {
    struct fake_rank_0 *fake = arg;
    struct nb_boot_config config = config_of(0);
    struct nb_shake shake = {0};
    struct wire_join_proof proof;
    struct wire_join_answer answer = {0};
    struct wire_join_verdict verdict = {0};
    uint8_t flags = 0;
    int64_t until = nb_now_ns() + LIMIT_NS;
    int fd = -1;
    while (fd < 0 && nb_now_ns() < until) {
        fd = accept4(fake->fd, NULL, NULL, SOCK_NONBLOCK);
    }
    if (nb_sock_read_all(fd, &shake.hello, sizeof shake.hello, until, NULL) == 0) {
        (void)nb_shake_challenge(&shake, NULL);
        take(&fake->in, &flags, 1);
        if ((flags & 1) != 0) {
            take(&fake->in, &shake.challenge, sizeof shake.challenge);
        }
        (void)nb_sock_write_all(fd, &shake.challenge, sizeof shake.challenge, until, NULL);
        (void)nb_sock_read_all(fd, &proof, sizeof proof, until, NULL);
        nb_shake_answer(&shake, &config, &answer);
        (void)nb_sock_write_all(fd, &answer, sizeof answer, until, NULL);
        take(&fake->in, &verdict, sizeof verdict);
        if ((flags & 2) == 0) {
            nb_shake_verdict(&shake, &config, &verdict);
        }
        (void)nb_sock_write_all(fd, &verdict, sizeof verdict, until, NULL);
    }
    close(fd);
    return NULL;
}

static void fuzz_client(struct input in) {
    struct nb_listener listener = {.fd = -1};
    struct nb_boot_config config = config_of(0);
    struct nb_boot boot = {0};
    struct nb_error err = {0};
    char address[NB_SOCK_TEXT];
    close(open_and_connect(&listener, &config));
    close(accept(listener.fd, NULL, NULL));
    struct fake_rank_0 fake = {.in = in, .fd = listener.fd};
    pthread_t thread;
    if (pthread_create(&thread, NULL, fake_rank_0_main, &fake) != 0) {
        abort();
    }
    nb_sock_format(&listener.addr, address);
    config.rank = 1;
    (void)nb_boot_join(&boot, &config, NULL, address, &err);
    pthread_join(thread, NULL);
    nb_boot_close(&boot);
    nb_listener_close(&listener);
}

static void fuzz_exchange(struct input in, int mode) {
    int pair[2];
    unsigned char mine[24] = {0};
    unsigned char all[48];
    struct nb_error err = {0};
    struct nb_boot boot = {.rank = mode == 4, .size = 2, .timeout_ms = TIMEOUT_MS};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) {
        abort();
    }
    boot.control = calloc(2, sizeof *boot.control);
    boot.control[0] = boot.rank == 0 ? -1 : pair[0];
    boot.control[1] = pair[0];
    (void)send(pair[1], in.data, in.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)shutdown(pair[1], SHUT_WR);
    if (mode == 5) {
        int64_t offset = 0;
        int64_t trip = 0;
        boot.rank = in.bytes % 2;
        boot.control[0] = boot.rank == 0 ? -1 : pair[0];
        (void)nb_boot_clock(&boot, &offset, &trip, &err);
    } else {
        (void)nb_boot_allgather(&boot, mine, sizeof mine, all, &err);
        (void)nb_boot_barrier(&boot, &err);
    }
    nb_boot_close(&boot);
    close(pair[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 1) {
        return 0;
    }
    struct input in = {.data = data + 1, .bytes = bytes - 1};
    int mode = data[0] % MODES;
    if (mode < 2) {
        fuzz_rank_0(in, mode == 1);
    } else if (mode == 2) {
        fuzz_client(in);
    } else {
        fuzz_exchange(in, mode);
    }
    return 0;
}
