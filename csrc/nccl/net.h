// Net plugin: point-to-point transfers between processes for NCCL, over the lanes of csrc/transport. tables.c adapts
// NCCL's tables to the functions below.
//
// Devices. There is one device. Its lanes are spread over the chosen interfaces, as those of a job are.
//
// Nets. The process has one net for each kind below that NCCL opened a context of. A traffic class of ours
// (ncclConfig_t.trafficClass, version 11 on) names the transport, so that communicators of one process can differ in it.
// All others have the transport of the environment.
//
// Links. NCCL opens a connection (a comm) for each channel and direction. All comms from one process to another share
// one link, per NCCL communicator where NCCL names it (version 11 on). A link is a control connection and a set of
// lanes between two ranks: the connecting process is rank 0, the accepting process rank 1. Payload goes from rank 0 to
// rank 1 only, so two processes that send to each other have two links. The number of flows is that of the lanes,
// whatever the number of channels.
//
// Handshake. A net has one listener while NCCL listens. A handle carries its address, the number of the listening
// comm and a token drawn for it. The key of the handshake is HMAC(NETBOTTLENECK_SECRET, token); without a secret, only
// the token proves that the peer belongs to the job. Hello, answer and proof prove the key on both sides. Then the helper
// thread of each opens its lanes. Join and welcome carry the lanes' addresses, or why there are none, under MACs.
// The lanes' session key is derived from the same nonces. A connection that does not prove the key in time is dropped
// (base/admission.h).
//
// Transfers. irecv sends a grant with the capacity, isend takes the oldest grant of its comm. A send of up to
// NB_NET_INLINE bytes goes over the control connection, inline; so does one of up to NB_NET_LONE bytes while no flow is
// active and the control connection drains quickly (nb_link_alone). A larger one gets the link's next operation number,
// is announced there with its true size, and travels over the lanes as one flow. Both sides add flows in the order of
// these numbers, as lanes.h demands. A send is done when the peer has it (inline: when the kernel has it), a receive
// when all bytes have landed.
//
// Early sends. A flow waits for its grant, so nothing but inline sends leaves before its receive is posted: at most
// NB_NET_EARLY of a comm, which the receiver keeps until then. The next grants are theirs. So inline sends need no grant
// each; after some in a row, the receiver holds back its grants, to send several at once. A sender that has a flow to
// send asks for them (want). Both count the same messages, so the sender knows when there may be any.
//
// Progress. A lock protects everything but the fields that test() reads. test() looks at its request, and if that is
// pending and the lock is free, it reads the control connection, and if that does not end it, runs one pass: events,
// lanes, ticks. So the latency is that of NCCL's own polling, without a change of threads. isend and irecv hand over at
// once what may leave. A helper thread keeps the links alive while NCCL does not call. It stays away as long as calls
// make progress. Only that thread opens lanes: over libfabric this takes long, and happens without the lock.
//
// Failures. A process that dies ends the control connection, and the link fails at once, or once its lanes are still: the
// report that a transfer has landed may be there. A silent peer fails it after
// NETBOTTLENECK_TIMEOUT_S, if a transfer is pending; so does a granted transfer that is the first
// to be served and does not move. A receive without a
// send has no deadline. A failed link closes its connections before any request shows the failure, so no late byte lands
// in memory that NCCL frees. The log names the peer once. Closing a comm or deregistering its memory with a transfer in
// flight fails the link: its bytes cannot be called back. Neither waits for the peer. NCCL does not tell when it gives up a
// connection that is not open yet: one that it does not ask for within that time is dropped, and a link that does not open
// is aimed at the newest comm's handle. accept() fails once a link to its listener has failed and the peer has not tried
// again within that time. Before any link it has no deadline: NCCL may call it long before the peer connects.
//
// fork. A child owns nothing: every call on inherited objects fails, or does nothing where it closes.
#ifndef NB_NCCL_NET_H
#define NB_NCCL_NET_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/admission.h"
#include "base/error.h"
#include "base/fork_detector.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "nccl/abi.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    NB_NET_REQUESTS = 64,       // of one comm; NCCL keeps up to 32
    NB_NET_INLINE = 4096,       // largest send that always takes the control connection
    NB_NET_LONE = 64 * 1024,    // largest send that may take it
    NB_NET_EARLY = 16,          // inline sends of one comm that have left before their grants, at most
    NB_NET_RUN = 32,            // after as many inline sends in a row, the receiver holds back its grants
    NB_NET_HELD_BACK = 8,       // they leave together
    NB_NET_BLOCK = 16 * 1024,   // of a flow
    NB_NET_MAP_WORDS = 4,       // of a flow's map inside the request: 4 MiB
    NB_NET_BYTES_MAX = 1 << 30, // largest message
    NB_NET_BINDS = 16,
    NB_NET_ID_BYTES = 16,
    NB_NET_TAG = 96,
    NB_NET_PEER_TEXT = NB_SOCK_TEXT + 32
};

struct nb_link;
struct nb_net;

// By NCCL's traffic class: those from NB_NET_TRAFFIC_CLASS + NB_NET_TCP on are ours, all others are NB_NET_PLAIN.
enum nb_net_kind { NB_NET_PLAIN, NB_NET_TCP, NB_NET_OFI, NB_NET_KINDS };

enum { NB_NET_TRAFFIC_CLASS = 0x6e6200 }; // "nb"

// What NCCL did with a kind of net in this process, since it began. contexts: calls of init. From NCCL 2.28.7 on there is
// one for each communicator that takes the network; before, also for those that do not, or one in all.
struct nb_net_counters {
    _Atomic uint64_t contexts;
    _Atomic uint64_t bytes; // of the payload handed over to send
};

// The table of version 6, with what the Python package reads. NCCL sees the table only.
struct nb_net_v6 {
    struct nccl_net_v6 table;
    const struct nb_net_counters *counters; // NB_NET_KINDS of them
    // Calls of getProperties. NCCL asks for those of a network only once a communicator may have it by its name.
    const _Atomic uint64_t *queries;
};

extern const struct nb_net_v6 ncclNetPlugin_v6;

// What NCCL carries from listen() to connect().
struct nb_net_handle {
    uint32_t magic;
    uint32_t process_number; // of the operating system, for messages
    unsigned char process[NB_NET_ID_BYTES];
    unsigned char token[NB_NET_ID_BYTES];
    uint64_t listener;
    uint64_t connecting; // connect(): the comm that is being opened, or 0
    uint16_t family;
    uint16_t port;
    unsigned char address[16];
};

_Static_assert(sizeof(struct nb_net_handle) <= NCCL_HANDLE_BYTES, "NCCL carries it");

enum nb_request_state { NB_REQUEST_IDLE, NB_REQUEST_PENDING, NB_REQUEST_DONE, NB_REQUEST_FAILED };

struct nb_net_request {
    _Atomic int state; // set last: all else is read by test() after it
    struct nb_net_comm *comm;
    struct nb_list link; // in one of the comm's lists
    char *data;
    size_t bytes; // to send; to receive: the capacity, then the true size
    uint64_t end; // inline send: nb_link.put_bytes behind it
    struct nb_flow flow;
    uint64_t map[NB_NET_MAP_WORDS];
    uint64_t *long_map; // of a flow with more blocks
    size_t long_words;
};

// Memory that NCCL registered with a comm.
struct nb_net_memory {
    struct nb_net *net;
    struct nb_net_comm *comm; // NULL: the comm is closed
    struct nb_list at_comm;
    char *base;
    size_t bytes;
    bool mapped; // with the lanes; else its transfers go through staging where the network needs registration
};

struct nb_net_comm {
    struct nb_net *net;
    struct nb_link *link; // NULL: the link is gone
    struct nb_list at_link;
    struct nb_list at_listener; // incoming: until accept(); outgoing: in net->connecting until connect() returns it
    uint32_t id;
    uint64_t connecting;
    int64_t asked_ns;        // connecting: when connect() was last called for it
    struct nb_net_handle to; // outgoing: the peer's handle
    bool sends;
    bool ended;             // the peer has closed its end
    bool logged;            // the log has the failure
    struct nb_list idle;    // requests; only the thread that calls isend, irecv and test uses it
    struct nb_list waiting; // not matched, oldest first
    struct nb_list active;  // flows on the lanes, and `arriving`
    struct nb_list writing; // inline sends that the link has not written, oldest first
    struct nb_list memories;
    struct nb_net_request *arriving; // an inline send lands in its memory; in `active`
    size_t grants[NB_NET_REQUESTS];  // capacities of the peer's receives
    unsigned grant_head;
    unsigned grant_count;
    unsigned early;      // inline sends that have left before their grants
    unsigned run;        // inline sends since the last flow or want, up to NB_NET_RUN
    struct nb_list kept; // inline sends that arrived before their receives were posted, oldest first
    unsigned kept_count;
    unsigned owed;                      // grants of kept sends in the output; the sender may wait for them
    size_t held_back[NB_NET_HELD_BACK]; // capacities of receives whose grants are held back
    unsigned held_back_count;
    struct nb_error failure; // set before a request shows it
    struct nb_net_request requests[NB_NET_REQUESTS];
};

struct nb_net_listener {
    struct nb_net *net;
    struct nb_list at_net;
    uint64_t id;
    unsigned char token[NB_NET_ID_BYTES];
    struct nb_list incoming;                       // comms that accept() has not returned
    struct nb_error failure;                       // of the last authenticated link to it, if no comm came after that
    bool logged;                                   // the log has it
    int64_t failed_ns;                             // since when the peer opens no other link
    unsigned char failed_process[NB_NET_ID_BYTES]; // the peer
};

struct nb_net_settings {
    const struct nb_lane_ops *transport;
    int lanes;
    int timeout_ms;
    size_t segment_bytes;
    struct nb_port_range ports;
    char provider[64]; // "": the best available
    char library[256];
    char congestion[16];
    unsigned char secret[NB_SHA256_BYTES]; // a digest of it
    size_t secret_bytes;
    struct nb_sockaddr binds[NB_NET_BINDS];
    char names[NB_NET_BINDS][IF_NAMESIZE];
    int bind_count;
    char tag[NB_NET_TAG]; // what both sides of a link must agree on
};

// What the comms of a link wait for.
struct nb_link_activity {
    bool pending;     // a request waits for the peer
    int64_t moved_ns; // when a transfer last began, moved or ended; 0: none is active
    int64_t heard_ns; // when bytes of an active receive last arrived; 0: none have
    uint64_t first;   // the active flow with the lowest number, which the lanes serve first. 0: an inline send arrives
    int64_t first_moved_ns; // when it last moved
};

// What a link reports. All with the lock.
struct nb_link_up {
    // A control message for a comm. False: the message is not allowed.
    bool (*opened)(struct nb_link *link, uint32_t id, uint64_t listener);
    bool (*granted)(struct nb_link *link, uint32_t id, uint64_t bytes);
    void (*wanted)(struct nb_link *link, uint32_t id);
    // data: the payload of an inline send; NULL: a flow of this number follows.
    bool (*sent)(struct nb_link *link, uint32_t id, uint64_t op, size_t bytes, const void *data);
    // The first `bytes` of an inline send of `total` have arrived. Copies them to the receive's memory and returns where
    // the rest goes; arrived() follows when all of it is there. NULL: no receive takes it, sent() gets it.
    char *(*arriving)(struct nb_link *link, uint32_t id, size_t total, const void *data, size_t bytes);
    void (*arrived)(struct nb_link *link, uint32_t id);
    void (*closed)(struct nb_link *link, uint32_t id);
    // A part of what waited in the output is written: all but the last out_bytes of put_bytes.
    void (*written)(struct nb_link *link);
    // True if the peer has closed its end of all comms.
    bool (*all_closed)(const struct nb_link *link);
    // The link has ended: its lanes are closed, link->failure says why.
    void (*ended)(struct nb_link *link);
    // Drops connecting comms that NCCL has given up: it calls connect() again and again for the others.
    void (*expire)(struct nb_net *net, int64_t now);
    struct nb_link_activity (*activity)(const struct nb_link *link);
};

// One per process and kind.
struct nb_net {
    enum nb_net_kind kind;
    struct nb_fork_detector fork;
    struct nb_net_settings settings;
    int users; // contexts that NCCL has not finalized, comms, listeners
    nccl_logger log;
    pthread_mutex_t lock;
    pthread_t helper;
    bool helper_runs;
    _Atomic bool stop;
    _Atomic uint64_t calls; // of NCCL, that make progress or need the lock
    _Atomic bool open_due;  // a link is NB_LINK_PROVEN: the helper thread is needed
    struct nb_loop loop;
    struct nb_loop
        sleep; // the helper thread's own: it watches `loop`, and calls that poll `loop` take no wake-up of it
    struct nb_watch slept;
    struct nb_admission admission;
    struct nb_watch listener;
    struct nb_gate gate;
    struct nb_sockaddr address; // of the listener
    unsigned char process[NB_NET_ID_BYTES];
    uint64_t next_id;
    struct nb_list links;
    struct nb_link *opening; // the link whose lanes the helper thread opens without the lock, or NULL: it is not freed
    struct nb_list listeners;
    struct nb_list connecting;
    const struct nb_link_up *up;
    int64_t ticked_ns;
    int64_t resumed_ns; // end of the last long time without a tick
    int unmapped_code;  // why memory could not be mapped, as the log has it; 0: that has not happened
};

// Writes to NCCL's log.
static inline void nb_net_log(const struct nb_net *net, int level, const char *text) {
    if (net->log != NULL) {
        net->log(level, NCCL_LOG_INIT_NET, "nccl", 0, "NET/NetBottleneck : %s", text);
    }
}

enum nb_link_state {
    NB_LINK_CONNECT, // outgoing: connecting, or waiting to connect again
    NB_LINK_ANSWER,  // outgoing: awaits the answer
    NB_LINK_HELLO,   // incoming: awaits the hello
    NB_LINK_PROOF,   // incoming: awaits the proof
    NB_LINK_PROVEN,  // the helper thread is to open this side's lanes
    NB_LINK_OPENING, // it opens them
    NB_LINK_WELCOME, // outgoing: awaits the welcome
    NB_LINK_JOIN,    // incoming: awaits the join
    NB_LINK_LANES,   // the lanes of both sides connect
    NB_LINK_READY,
    NB_LINK_ENDED // closed; freed once no comm refers to it
};

struct nb_link_shake;

struct nb_link {
    struct nb_net *net;
    struct nb_list at_net;
    enum nb_link_state state;
    bool outgoing;
    struct nb_watch watch; // of the control connection
    struct nb_pending pending;
    bool admitted; // incoming: authenticated
    struct nb_sockaddr to;
    unsigned char process[NB_NET_ID_BYTES]; // of the peer
    uint64_t domain;                        // NCCL's number of the communicator, or 0
    uint64_t listener;
    unsigned char key[NB_SHA256_BYTES];
    char peer[NB_NET_PEER_TEXT];
    struct nb_boot boot; // rank, size and session for the lanes
    struct nb_link_shake *shake;
    struct nb_lanes *lanes;
    struct nb_list comms;
    uint32_t next_comm;
    uint64_t next_op;
    struct nb_list sinks; // flows of comms that were closed here
    long flows;           // of requests, on the lanes
    int64_t polled_ns;    // last progress of the lanes
    bool leaving;         // outgoing: the last comm is closed
    bool left;            // incoming: the peer leaves
    bool failing;         // fails at the end of this pass
    struct nb_error failure;
    int64_t opened_ns; // begin of the handshake
    int64_t retry_ns;
    int connect_code; // why the last try to connect failed; 0: none has
    int64_t heard_ns; // when the peer last sent a message, or ended a transfer
    int64_t pinged_ns;
    int64_t moved_ns; // when a transfer last began or ended
    uint64_t first;   // see nb_link_activity
    int64_t first_ns; // since when it is the first
    int64_t leave_ns;
    int64_t lost_ns;   // since when no lane is left; 0: one is
    int64_t over_ns;   // since when the peer has closed all comms and the control connection, and flows are left; or 0
    int64_t lone_ns;   // when lone sends began to drain; 0: none drains
    uint64_t lone_put; // put_bytes then
    int lone_count;    // lone sends since
    bool lone_quick;   // the last ones drained quickly
    int64_t lanes_ns;  // until then, lone sends take the lanes
    int64_t back_ns;   // how long they do after the next slow one
    char *in;
    size_t in_bytes;
    char *direct; // where the rest of an inline send goes
    size_t direct_left;
    uint32_t direct_comm;
    char *out;
    size_t out_room;
    size_t out_begin;
    size_t out_bytes;
    uint64_t put_bytes; // all that was put into the output since it was opened
    bool blocked;       // the connection takes no more of the output now
    bool flush_due;     // with the next pass
    int send_code;      // of a failed send, which the end of the input judges; 0: none
};

// Links: link.c, handshake.c and output.c. All with the lock.

// Starts listening, unless that is done.
int nb_links_listen(struct nb_net *net, struct nb_error *err);
void nb_links_listen_end(struct nb_net *net);
// The listening comm of a number; NULL: it is closed.
struct nb_net_listener *nb_links_listener(const struct nb_net *net, uint64_t id);
// True while an authenticated link from a process opens.
bool nb_links_opening(const struct nb_net *net, const unsigned char process[NB_NET_ID_BYTES]);
// The link to the process of a handle, opened if there is none.
int nb_link_find(struct nb_net *net, uint64_t domain, const struct nb_net_handle *handle, struct nb_link **link,
                 struct nb_error *err);
void nb_link_open_comm(struct nb_link *link, uint32_t id, uint64_t listener);
void nb_link_close_comm(struct nb_link *link, uint32_t id);
// Asks the peer for the grants of a comm that it holds back.
void nb_link_want(struct nb_link *link, uint32_t id);
// spare: nothing waits for the grant, so it leaves with the next pass, off the way of what follows.
void nb_link_grant(struct nb_link *link, uint32_t id, size_t capacity, bool spare);
// Announces a send. data NULL: a flow of this number follows.
void nb_link_send(struct nb_link *link, uint32_t id, uint64_t op, const void *data, size_t bytes);
// Drops the rest of the inline send that is arriving, instead of writing it to its memory.
void nb_link_drop(struct nb_link *link);
// Reads the control connection if nothing is on the lanes: sooner than a pass.
void nb_link_poll(struct nb_link *link);
// True if the lanes are idle and the control connection drains quickly: a send of up to NB_NET_LONE bytes is sooner there
// than on the lanes.
bool nb_link_alone(struct nb_link *link);
// Call when a comm of the link is gone.
void nb_link_release(struct nb_link *link);
// Fails the link at the end of this pass.
void nb_link_fail(struct nb_link *link, const struct nb_error *why);
// Ends all links of a process at once, and frees them.
void nb_links_close(struct nb_net *net);
// Runs one progress pass.
void nb_links_progress(struct nb_net *net);
// Opens the lanes of a link that is due, without the lock where that takes long. For the helper thread only.
void nb_links_open(struct nb_net *net);
// Call before sleeping. Returns how long at most, in ms; 0: less, as flows wait for lanes that wake nobody.
int nb_links_arm(const struct nb_net *net);
// True while a peer's kernel does not have all that was sent to it.
bool nb_links_unsent(const struct nb_net *net);
// True while a link only waits for what it wrote to be read. *unsent: a peer's kernel does not have all of it.
bool nb_links_leaving(const struct nb_net *net, bool *unsent);

// settings.c: reads the environment. A value that is not understood is a failure that names its variable. kind: names the
// transport; NB_NET_PLAIN: the environment does.
int nb_net_settings_read(struct nb_net_settings *settings, enum nb_net_kind kind, struct nb_error *err);
// Fails if this host lacks the library, the provider or the congestion control that is set, and names the variable. Loads
// the library, which takes long.
int nb_net_settings_check(const struct nb_net_settings *settings, struct nb_error *err);
// A lane's config as far as the settings say it, at the first bind. Its texts are the settings' own.
struct nb_lane_config nb_net_settings_lane(const struct nb_net_settings *settings);

// net.c

extern struct nb_net_counters nb_net_counts[NB_NET_KINDS];
// Opens this process's net of a kind, or adds a user to it.
int nb_net_open(struct nb_net **net, enum nb_net_kind kind, const struct nb_link_up *up, nccl_logger log,
                struct nb_error *err);
void nb_net_close(struct nb_net *net);
// This process's net of a kind, NULL if there is none.
struct nb_net *nb_net_current(enum nb_net_kind kind);
// True in the process that opened the net, false in its forked children.
bool nb_net_is_mine(const struct nb_net *net);

// Comms: comm.c. Each returns 0 or a failure. err is set unless the log has it already, as that of a link that ended.

extern const struct nb_link_up nb_comm_up;
int nb_net_listen(struct nb_net *net, void *handle, struct nb_net_listener **listener, struct nb_error *err);
void nb_net_listener_close(struct nb_net_listener *listener);
// *comm NULL: call again, with the same handle.
int nb_net_connect(struct nb_net *net, uint64_t domain, void *handle, struct nb_net_comm **comm, struct nb_error *err);
int nb_net_accept(struct nb_net_listener *listener, struct nb_net_comm **comm, struct nb_error *err);
int nb_net_register(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_memory **memory,
                    struct nb_error *err);
// After it returns nothing reads or writes the memory. Transfers that still need it fail, and with them the comm or,
// where bytes are on their way, the link.
void nb_net_deregister(struct nb_net_memory *memory);
// *request NULL: as many are pending as may be; call again.
int nb_net_isend(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_request **request,
                 struct nb_error *err);
int nb_net_irecv(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_request **request,
                 struct nb_error *err);
// 1: done, and the request is gone; 0: pending.
int nb_net_test(struct nb_net_request *request, size_t *bytes, struct nb_error *err);
void nb_net_comm_close(struct nb_net_comm *comm);

#endif
