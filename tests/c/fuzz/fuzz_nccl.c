// Fuzzes the NCCL net plugin's handshake with the bytes of a broken peer. The first byte selects the receiver. 0: the
// listener, raw bytes. 1: the same after a valid hello. 2: the same after a valid proof and join, so control messages
// follow. 3: the connecting side, from a listener that knows the token.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "nccl/handshake.c" // the messages of the handshake, and their MACs

enum { MODES = 4, UNTIL_NS = 100 * 1000 * 1000, DRAINED = 256, FAILED = 255 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

// The fuzzer's end of a handshake.
struct end {
    struct nb_link link;
    struct nb_link_shake shake;
    int fd;
    int64_t until_ns;
};

static void end_init(struct end *end, struct nb_net *net, const struct nb_net_handle *handle, int fd) {
    *end = (struct end){.link = {.net = net}, .fd = fd, .until_ns = nb_now_ns() + UNTIL_NS};
    end->link.shake = &end->shake;
    key_derive(&end->link, handle->token);
}

static bool send_bytes(const struct end *end, const void *data, size_t bytes) {
    return nb_sock_write_all(end->fd, data, bytes, end->until_ns, NULL) == 0;
}

static bool receive_bytes(const struct end *end, void *data, size_t bytes) {
    return nb_sock_read_all(end->fd, data, bytes, end->until_ns, NULL) == 0;
}

static bool send_valid_hello(struct end *end, const struct nb_net_handle *handle, struct input *in) {
    struct wire_hello *hello = &end->shake.hello;
    *hello = (struct wire_hello){.magic = MAGIC, .version = WIRE_VERSION, .listener = handle->listener};
    take(in, hello->nonce, sizeof hello->nonce);
    take(in, hello->process, 1);
    memcpy(hello->tag, end->link.net->settings.tag, sizeof hello->tag);
    return send_bytes(end, hello, sizeof *hello) && receive_bytes(end, &end->shake.answer, sizeof end->shake.answer);
}

// Joins with lane addresses that cannot be reached. The input selects their length, and whether the lanes have failed,
// with a text that does not end.
static bool send_valid_join(struct end *end, struct input *in) {
    struct {
        struct wire_opened opened;
        struct wire_lane_address address;
    } join = {.address = {.bytes = take_byte(in)}};
    unsigned char mac[NB_SHA256_BYTES];
    struct sockaddr_in unreachable = {
        .sin_family = AF_INET, .sin_port = 1, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    if (join.address.bytes == FAILED) {
        join.opened.code = -1;
        memset(join.opened.text, take_byte(in), sizeof join.opened.text);
    }
    join.address.bytes = join.address.bytes == 0 ? sizeof unreachable : join.address.bytes;
    memcpy(join.address.addr, &unreachable, sizeof unreachable);
    mac_of(&end->link, "proof", "", 0, mac);
    if (!send_bytes(end, mac, sizeof mac)) {
        return false;
    }
    mac_of(&end->link, "join", &join, sizeof join, mac);
    return send_bytes(end, mac, sizeof mac) && send_bytes(end, &join, sizeof join);
}

// Writes the rest of the input, and reads until the plugin closes the connection.
static void send_rest(const struct end *end, const struct input *in) {
    char answer[DRAINED];
    (void)send_bytes(end, in->data, in->bytes);
    (void)shutdown(end->fd, SHUT_WR);
    while (receive_bytes(end, answer, 1)) {
    }
}

static void fuzz_listener(struct input in, struct nb_net *net, struct nb_net_listener *listener,
                          const struct nb_net_handle *handle, int mode) {
    struct nb_error err = {0};
    struct nb_sockaddr to;
    struct end end;
    struct nb_net_comm *comm = NULL;
    if (handle_address(handle, &to) < 0) {
        abort();
    }
    end_init(&end, net, handle, nb_sock_connect(&to, NULL, NULL, &err));
    if (mode == 0 || (send_valid_hello(&end, handle, &in) && (mode == 1 || send_valid_join(&end, &in)))) {
        send_rest(&end, &in);
    }
    (void)nb_net_accept(listener, &comm, &err);
    if (comm != NULL) {
        nb_net_comm_close(comm);
    }
    close(end.fd);
}

// The plugin connects to the fuzzer's listener.
static void fuzz_connecting_side(struct input in, struct nb_net *net, struct nb_net_handle handle) {
    struct nb_error err = {0};
    struct nb_net_comm *comm = NULL;
    struct sockaddr_in listener_address = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof listener_address;
    int listener_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener_fd < 0 || bind(listener_fd, (struct sockaddr *)&listener_address, sizeof listener_address) != 0 ||
        listen(listener_fd, 1) != 0 || getsockname(listener_fd, (struct sockaddr *)&listener_address, &length) != 0) {
        abort();
    }
    handle.family = AF_INET;
    handle.port = ntohs(listener_address.sin_port);
    memcpy(handle.address, &listener_address.sin_addr, sizeof listener_address.sin_addr);
    handle.process[0] ^= 1; // another process
    (void)nb_net_connect(net, 0, &handle, &comm, &err);
    struct end end;
    end_init(&end, net, &handle, accept4(listener_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (receive_bytes(&end, &end.shake.hello, sizeof end.shake.hello)) {
        struct wire_answer *answer = &end.shake.answer;
        uint8_t flags = take_byte(&in);
        take(&in, answer, (flags & 1) != 0 ? sizeof *answer : 0);
        memcpy(answer->tag, net->settings.tag, sizeof answer->tag);
        if ((flags & 2) != 0) {
            answer->code = 0;
            mac_of(&end.link, "answer", "", 0, answer->mac);
        }
        (void)send_bytes(&end, answer, sizeof *answer);
        send_rest(&end, &in);
    }
    (void)nb_net_connect(net, 0, &handle, &comm, &err);
    if (comm != NULL) {
        nb_net_comm_close(comm);
    }
    close(end.fd);
    close(listener_fd);
}

static void set_environment(void) {
    (void)setenv("NETBOTTLENECK_IFNAME", "lo", 1);
    (void)setenv("NETBOTTLENECK_STREAMS", "1", 1);
    (void)setenv("NETBOTTLENECK_TIMEOUT_S", "0.1", 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct input in = {.data = data, .bytes = bytes};
    struct nb_error err = {0};
    struct nb_net *net = NULL;
    struct nb_net_listener *listener = NULL;
    union {
        struct nb_net_handle handle;
        char room[NCCL_HANDLE_BYTES];
    } handle_room = {.room = {0}};
    int mode = take_byte(&in) % MODES;
    set_environment();
    if (nb_net_open(&net, NB_NET_PLAIN, &nb_comm_up, NULL, &err) < 0 ||
        nb_net_listen(net, &handle_room, &listener, &err) < 0) {
        abort();
    }
    if (mode < 3) {
        fuzz_listener(in, net, listener, &handle_room.handle, mode);
    } else {
        fuzz_connecting_side(in, net, handle_room.handle);
    }
    nb_net_listener_close(listener);
    nb_net_close(net);
    return 0;
}
