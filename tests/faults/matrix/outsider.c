// An outsider that speaks libfabric: it knows a port, but no secret and no key. It opens an endpoint and sends writes
// without bytes, each with the completion data that announces an arrived block to a rank.
//   outsider HOST PORT PROVIDER COUNT
#include <arpa/inet.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONTEXTS = 1024, ERRORS = 100, BLOCKS = 256, SLOTS = 8, TRIES = 2000 };

struct outsider {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    fi_addr_t peer;
    long errors;
};

static struct fi_context2 contexts[CONTEXTS];

static void fail_if(long rc, const char *what) {
    if (rc < 0) {
        printf("%s: %s\n", what, fi_strerror((int)-rc));
        exit(1);
    }
}

static void pause_us(long us) {
    struct timespec left = {.tv_nsec = us * 1000};
    nanosleep(&left, NULL);
}

static void endpoint_open(struct outsider *me, char *const *args) {
    struct fi_info *hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->cq_data_size = 4;
    hints->fabric_attr->prov_name = strdup(args[3]);
    hints->addr_format = FI_SOCKADDR_IN;
    fail_if(fi_getinfo(FI_VERSION(1, 17), args[1], "0", FI_SOURCE | FI_NUMERICHOST, hints, &me->info), "fi_getinfo");
    fi_freeinfo(hints);
    fail_if(fi_fabric(me->info->fabric_attr, &me->fabric, NULL), "fi_fabric");
    fail_if(fi_domain(me->fabric, me->info, &me->domain, NULL), "fi_domain");
    struct fi_cq_attr cq = {.size = CONTEXTS, .format = FI_CQ_FORMAT_DATA};
    fail_if(fi_cq_open(me->domain, &cq, &me->cq, NULL), "fi_cq_open");
    struct fi_av_attr av = {.type = me->info->domain_attr->av_type, .count = 2};
    fail_if(fi_av_open(me->domain, &av, &me->av, NULL), "fi_av_open");
    fail_if(fi_endpoint(me->domain, me->info, &me->ep, NULL), "fi_endpoint");
    fail_if(fi_ep_bind(me->ep, &me->cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    fail_if(fi_ep_bind(me->ep, &me->av->fid, 0), "fi_ep_bind");
    fail_if(fi_enable(me->ep), "fi_enable");
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(args[2]))};
    inet_pton(AF_INET, args[1], &to.sin_addr);
    fail_if(fi_av_insert(me->av, &to, 1, &me->peer, 0, NULL) == 1 ? 0 : -FI_EINVAL, "fi_av_insert");
}

static long completed(struct outsider *me) {
    struct fi_cq_data_entry entries[16];
    long got = (long)fi_cq_read(me->cq, entries, 16);
    if (got == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};
        fi_cq_readerr(me->cq, &error, 0);
        me->errors++;
    }
    return got > 0 ? got : 0;
}

int main(int argc, char **argv) {
    struct outsider me = {0};
    if (argc < 5) {
        return 2;
    }
    endpoint_open(&me, argv);
    long count = atol(argv[4]), done = 0, tries = 0;
    for (long i = 0; i < count && me.errors < ERRORS && tries < TRIES;) {
        uint64_t slot = (uint64_t)(i / BLOCKS % SLOTS), block = (uint64_t)(i * 16 % BLOCKS);
        uint64_t data = slot << 26 | block << 8 | 15, guess = (uint64_t)random() << 32;
        struct fi_msg_rma message = {
            .addr = me.peer,
            .context = &contexts[i % CONTEXTS],
            .data = me.info->domain_attr->cq_data_size >= 8 ? guess | data : data,
        };
        long rc = (long)fi_writemsg(me.ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
        done += completed(&me);
        if (rc == 0) {
            i++, tries = 0;
        } else if (rc != -FI_EAGAIN) {
            break;
        }
        tries += rc != 0;
        pause_us(200);
    }
    for (tries = 0; tries < 500 && done < count; tries++) {
        done += completed(&me);
        pause_us(1000);
    }
    printf("written %ld of %ld, %ld errors\n", done, count, me.errors);
    return 0;
}
