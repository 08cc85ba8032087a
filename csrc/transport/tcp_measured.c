// What the kernel measured of a TCP connection. In a file of its own: netinet/tcp.h has an older struct tcp_info.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/tcp_internal.h"
#include "transport/transport.h"

// A peer acknowledges every second packet at once, and the last one late.
enum { LATE_PACKETS = 2, NS_PER_US = 1000 };

void nb_tcp_measured(int fd, struct nb_held *held) {
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) < 0) {
        return;
    }
    held->late_bytes = (size_t)LATE_PACKETS * info.tcpi_snd_mss;
    held->round_trip_ns = (int64_t)info.tcpi_min_rtt * NS_PER_US;
}
