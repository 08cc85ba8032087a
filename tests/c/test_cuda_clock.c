// Device clock over the fake driver: times of marks on the host's clock, their order, captures, lost marks and failures.
#include <errno.h>
#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../cuda/fake.h"
#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "cuda/clock.h"
#include "cuda/driver.h"

enum { SEEDS = 100, MARKS = 40, DELAY_NS = 300000, FULL = 8192, LIMIT_S = 60 };

static const struct fake_controls *fake;
static struct nb_cuda_driver driver;
static struct nb_cuda_device device;
static struct nb_cuda_clock *clock_;
static struct nb_cuda_kept_streams kept;
static struct CUstream_st *stream;

static int64_t ahead_ns; // of the core's clock, not of the fake device's

int __real_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now);

int __wrap_clock_gettime(clockid_t id, struct timespec *now) {
    int rc = __real_clock_gettime(id, now);
    now->tv_sec += ahead_ns / 1000000000;
    now->tv_nsec += ahead_ns % 1000000000;
    now->tv_sec += now->tv_nsec / 1000000000;
    now->tv_nsec %= 1000000000;
    return rc;
}

static void begin(uint64_t seed, int64_t delay_ns, int64_t ppm) {
    struct nb_error err = {0};
    fake->reset(seed, delay_ns);
    fake->set_clock(ppm);
    kept = (struct nb_cuda_kept_streams){0};
    CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == 0, "%s", err.text);
    CHECK(nb_cuda_device_open(&device, &driver, 0, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_clock_open(&clock_, &device, &kept, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
    CHECK(driver.stream_create(&stream, NB_CUDA_STREAM_NON_BLOCKING) == NB_CUDA_SUCCESS, "stream");
    nb_cuda_leave(&device);
}

// Only the kept stream is left, and what retains its context.
static void close_clock(void) {
    const int streams = kept.of[0] != NULL;
    nb_cuda_clock_close(clock_);
    nb_cuda_device_close(&device);
    struct fake_live_objects alive = fake->live_objects();
    CHECK(alive.events == 0 && alive.streams == streams && alive.contexts == streams,
          "%d events, %d streams, %d contexts are left", alive.events, alive.streams, alive.contexts);
}

static void end(void) {
    struct nb_error err = {0};
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
    CHECK(driver.stream_destroy(stream) == NB_CUDA_SUCCESS, "stream");
    nb_cuda_leave(&device);
    close_clock();
}

static void mark(uint64_t number, bool in_order) {
    struct nb_error err = {0};
    CHECK(nb_cuda_clock_mark(clock_, stream, &(struct nb_cuda_mark){.words = {number}}, in_order, &err) == 0, "%s",
          err.text);
}

// Reads the next mark, when the device has passed it.
static int64_t read_mark(uint64_t *number) {
    struct nb_error err = {0};
    struct nb_cuda_mark found = {0};
    int64_t time_ns = 0;
    int64_t until_ns = nb_now_ns() + (int64_t)LIMIT_S * 1000000000;
    int rc = 0;
    while (rc == 0) {
        CHECK(nb_cuda_clock_look(clock_, &err) == 0, "%s", err.text);
        rc = nb_cuda_clock_next(clock_, &found, &time_ns, &err);
        CHECK(nb_now_ns() < until_ns, "a mark was not passed in %d s", LIMIT_S);
    }
    CHECK(rc == 1, "%s", err.text);
    *number = found.words[0];
    return time_ns;
}

// The host's own bounds of a mark hold within the stated error, on a clock that runs at another rate.
static void test_times_lie_between_record_and_read(uint64_t seed, int64_t ppm) {
    begin(seed, DELAY_NS, ppm);
    int64_t before_ns[MARKS];
    for (uint64_t i = 0; i < MARKS; i++) {
        before_ns[i] = nb_now_ns();
        mark(i, true);
    }
    int64_t last_ns = 0;
    for (uint64_t i = 0; i < MARKS; i++) {
        uint64_t number;
        int64_t time_ns = read_mark(&number);
        CHECK(number == i, "mark %llu in place of %llu", (unsigned long long)number, (unsigned long long)i);
        CHECK(time_ns >= before_ns[i] && time_ns <= nb_now_ns(), "mark %llu", (unsigned long long)i);
        CHECK(time_ns >= last_ns, "mark %llu is before the one before it", (unsigned long long)i);
        last_ns = time_ns;
    }
    CHECK(nb_cuda_clock_pending(clock_) == 0 && nb_cuda_clock_lost(clock_) == 0, "marks are left or lost");
    CHECK(nb_cuda_clock_take_error_ns(clock_) > 0, "no error is stated");
    end();
}

// A device that stands still for a known time: the interval between two marks has that length, within the error.
static void test_a_held_stream_is_measured(int64_t ppm) {
    begin(1, 0, ppm);
    const int64_t held_ns = 150 * 1000 * 1000; // beyond one base
    uint64_t number;
    mark(1, true);
    int64_t first_ns = read_mark(&number);
    (void)nb_cuda_clock_take_error_ns(clock_);
    fake->hold(stream, true);
    mark(2, true);
    int64_t from_ns = nb_now_ns();
    struct nb_error err = {0};
    while (nb_now_ns() - from_ns < held_ns) {
        CHECK(nb_cuda_clock_look(clock_, &err) == 0, "%s", err.text); // probes are passed meanwhile
        struct nb_cuda_mark none;
        int64_t time_ns;
        CHECK(nb_cuda_clock_next(clock_, &none, &time_ns, &err) == 0, "a held mark was read: %s", err.text);
    }
    int64_t freed_ns = nb_now_ns();
    fake->hold(stream, false);
    int64_t second_ns = read_mark(&number);
    CHECK(second_ns >= freed_ns - nb_cuda_clock_take_error_ns(clock_), "mark 2 is %lld ns before the device went on",
          (long long)(freed_ns - second_ns));
    CHECK(first_ns < from_ns, "mark 1 is after the device stood still");
    for (uint64_t i = 3; i < 20; i++) { // the base has moved
        int64_t at_ns = nb_now_ns();
        mark(i, true);
        int64_t time_ns = read_mark(&number);
        CHECK(number == i && time_ns >= at_ns, "mark %llu", (unsigned long long)i);
    }
    end();
}

static void test_a_captured_stream_is_left_untouched(void) {
    begin(1, 0, 0);
    mark(1, true);
    fake->capture(stream, true);
    unsigned long long before = fake->submitted(stream);
    mark(2, true);
    CHECK(nb_cuda_clock_lost(clock_) == 1, "the mark is not counted");
    CHECK(fake->submitted(stream) == before, "the captured stream got work");
    uint64_t number;
    (void)read_mark(&number); // a query is allowed during the capture
    CHECK(number == 1, "mark %llu", (unsigned long long)number);
    fake->capture(stream, false);
    mark(3, true);
    (void)read_mark(&number);
    CHECK(number == 3, "mark %llu", (unsigned long long)number);
    end();
}

static void test_a_stream_of_another_context_is_named(void) {
    begin(1, 0, 0);
    struct nb_error err = {0};
    struct nb_cuda_device other = {0};
    struct CUstream_st *foreign = NULL;
    CHECK(nb_cuda_device_open(&other, &driver, 1, &err) == 0 && nb_cuda_enter(&other, &err) == 0, "%s", err.text);
    CHECK(driver.stream_create(&foreign, NB_CUDA_STREAM_NON_BLOCKING) == NB_CUDA_SUCCESS, "stream");
    int rc = nb_cuda_clock_mark(clock_, foreign, &(struct nb_cuda_mark){0}, true, &err);
    CHECK(rc == -EINVAL && strstr(err.text, "CUDA: cuEventRecord on device 0: the stream is not of the device's "
                                            "primary context (400): use streams of torch.cuda") == err.text,
          "%d, %s", rc, err.text);
    CHECK(nb_cuda_clock_pending(clock_) == 0, "the mark is kept");
    CHECK(driver.stream_destroy(foreign) == NB_CUDA_SUCCESS, "stream");
    nb_cuda_leave(&other);
    nb_cuda_device_close(&other);
    end();
}

static void test_a_full_queue_keeps_its_marks(void) {
    begin(1, 0, 0);
    fake->hold(stream, true);
    for (uint64_t i = 0; i < FULL + 5; i++) {
        mark(i, false);
    }
    CHECK(nb_cuda_clock_pending(clock_) == FULL && nb_cuda_clock_lost(clock_) == 5, "%zu, %llu",
          nb_cuda_clock_pending(clock_), (unsigned long long)nb_cuda_clock_lost(clock_));
    fake->hold(stream, false);
    for (uint64_t i = 0; i < FULL; i++) {
        uint64_t number;
        (void)read_mark(&number);
        CHECK(number == i, "mark %llu", (unsigned long long)number);
    }
    end();
}

// The driver's float has little resolution after a long time without a mark: for the mark, and for the probe before it.
static void test_the_error_has_the_rounding_of_an_old_base(void) {
    const int64_t hour_ns = (int64_t)3600 * 1000000000;
    const double rounding_ns = (double)hour_ns * FLT_EPSILON / 2;
    uint64_t number;
    begin(1, 0, 0);
    mark(1, true);
    (void)read_mark(&number);
    (void)nb_cuda_clock_take_error_ns(clock_);
    fake->set_clock(hour_ns / (nb_now_ns() / 1000000) + 1);
    ahead_ns = hour_ns;
    mark(2, true);
    (void)read_mark(&number);
    int64_t error_ns = nb_cuda_clock_take_error_ns(clock_);
    CHECK((double)error_ns >= 2 * rounding_ns, "the error is %lld ns, not 2 * %.0f", (long long)error_ns, rounding_ns);
    ahead_ns = 0;
    end();
}

// torch records an event on the stream when it frees memory that was used there, and the next clock has it again.
static void test_the_stream_outlives_the_clock(void) {
    struct nb_error err = {0};
    struct CUevent_st *event = NULL;
    begin(1, 0, 0);
    struct CUstream_st *own = nb_cuda_clock_stream(clock_);
    const struct nb_cuda_device left = device; // retains nothing once `device` is closed
    end();
    CHECK(nb_cuda_enter(&left, &err) == 0, "%s", err.text);
    CHECK(driver.event_create(&event, 0) == NB_CUDA_SUCCESS, "event");
    CHECK(driver.event_record(event, own) == NB_CUDA_SUCCESS, "the stream of a closed clock cannot be used");
    CHECK(driver.event_destroy(event) == NB_CUDA_SUCCESS, "event");
    nb_cuda_leave(&left);
    CHECK(nb_cuda_device_open(&device, &driver, 0, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_clock_open(&clock_, &device, &kept, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_clock_stream(clock_) == own, "another clock has another stream");
    close_clock();
}

// Each call of the driver fails once: the failure is returned, and nothing but the kept stream is left at the end.
static void test_failed_calls(void) {
    for (int n = 1; n < 40; n++) {
        struct nb_error err = {0};
        struct nb_cuda_mark found;
        int64_t time_ns;
        fake->reset(1, 0);
        kept = (struct nb_cuda_kept_streams){0};
        CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == 0, "%s", err.text);
        CHECK(nb_cuda_device_open(&device, &driver, 0, &err) == 0, "%s", err.text);
        fake->fail_call(n, NB_CUDA_OUT_OF_MEMORY);
        clock_ = NULL;
        int rc = nb_cuda_clock_open(&clock_, &device, &kept, &err);
        for (uint64_t i = 0; rc >= 0 && i < 8; i++) {
            struct CUstream_st *own = nb_cuda_clock_stream(clock_);
            rc = nb_cuda_clock_mark(clock_, own, &(struct nb_cuda_mark){.words = {i}}, true, &err);
            rc = rc < 0 ? rc : nb_cuda_clock_look(clock_, &err);
            rc = rc < 0 ? rc : nb_cuda_clock_next(clock_, &found, &time_ns, &err);
        }
        CHECK(rc >= 0 || (rc == -ENOMEM && strstr(err.text, "CUDA: cu") == err.text), "call %d: %d, %s", n, rc,
              err.text);
        fake->fail_call(0, 0);
        close_clock();
    }
}

int main(void) {
    fake = fake_controls_get();
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        test_times_lie_between_record_and_read(seed, (int64_t)seed % 3 * 90 - 90);
    }
    test_a_held_stream_is_measured(0);
    test_a_held_stream_is_measured(150);
    test_a_held_stream_is_measured(-150);
    test_a_captured_stream_is_left_untouched();
    test_a_stream_of_another_context_is_named();
    test_a_full_queue_keeps_its_marks();
    test_the_error_has_the_rounding_of_an_old_base();
    test_the_stream_outlives_the_clock();
    test_failed_calls();
    fake->reset(1, 0);
    return 0;
}
