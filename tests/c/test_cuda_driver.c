// CUDA driver library: errors if it is missing or unusable.
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "check.h"
#include "cuda/driver.h"

static void expect_error(const char *library, const char *text) {
    struct nb_cuda_driver driver = {0};
    struct nb_error err = {0};
    int rc = nb_cuda_driver_open(&driver, library, &err);
    CHECK(rc == NB_ENOLIB && err.code == NB_ENOLIB, "%d, recorded %d", rc, err.code);
    CHECK(strcmp(err.text, text) == 0, "%s", err.text);
    CHECK(driver.version == 0, "version %d was set", driver.version);
}

static void test_no_driver(void) {
    struct nb_cuda_driver driver = {0};
    struct nb_error err = {0};
    int rc = nb_cuda_driver_open(&driver, NULL, &err);
    const char *text = "CUDA: libcuda.so.1 cannot be loaded (no NVIDIA driver here): move the model to the CPU";
    if (rc == NB_ENOLIB && strstr(err.text, "cannot be loaded") != NULL) {
        CHECK(strcmp(err.text, text) == 0, "%s", err.text);
    } else { // a machine with a driver
        CHECK(rc < 0 || driver.version >= NB_CUDA_VERSION_MIN, "version %d", driver.version);
    }
}

static void test_named_file_missing(void) {
    struct nb_cuda_driver driver;
    struct nb_error err = {0};
    CHECK(nb_cuda_driver_open(&driver, "/nowhere/libcuda.so.1", &err) == NB_ENOLIB, "%s", err.text);
    CHECK(strncmp(err.text, "CUDA: /nowhere/libcuda.so.1 cannot be loaded (", 46) == 0, "%s", err.text);
}

static void test_another_library(void) {
    expect_error("libm.so.6", "CUDA: libm.so.6 is not a CUDA driver: it tells no version");
}

int main(void) {
    test_no_driver();
    test_named_file_missing();
    test_another_library();
    return 0;
}
