// CUDA driver library: errors if it is missing or unusable.
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cuda/fake.h"
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

// The version and the result of cuInit, as the usual driver gives them to any caller.
static unsigned init_driver(void *library, int *version) {
    unsigned (*get_version)(int *version) = NULL;
    unsigned (*init)(unsigned flags) = NULL;
    void *symbols[] = {dlsym(library, "cuDriverGetVersion"), dlsym(library, "cuInit")};
    CHECK(symbols[0] != NULL && symbols[1] != NULL, "libcuda.so.1 is not a CUDA driver");
    memcpy(&get_version, &symbols[0], sizeof get_version);
    memcpy(&init, &symbols[1], sizeof init);
    CHECK(get_version(version) == NB_CUDA_SUCCESS, "libcuda.so.1 tells no version");
    return init(0);
}

static void check_opened(const struct nb_cuda_driver *driver, void *library, int version) {
    CHECK(driver->version == version, "version %d, not %d", driver->version, version);
    CHECK(strstr(driver->path, "libcuda.so.1") != NULL, "path '%s'", driver->path);
    CHECK((void *)driver->init == dlsym(library, "cuInit"), "cuInit is not libcuda.so.1's");
}

// The outcome follows from this machine's driver: it is missing, too old, without a usable GPU, or works.
static void test_usual_library(void) {
    struct nb_cuda_driver driver = {0};
    struct nb_error err = {0};
    int rc = nb_cuda_driver_open(&driver, NULL, &err);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *text = "CUDA: libcuda.so.1 cannot be loaded (no NVIDIA driver here): move the model to the CPU";
        CHECK(rc == NB_ENOLIB && err.code == rc && strcmp(err.text, text) == 0, "no driver: %d, %s", rc, err.text);
        CHECK(driver.version == 0, "version %d was set", driver.version);
        return;
    }
    int version = 0;
    unsigned result = init_driver(library, &version);
    bool no_device = result == NB_CUDA_NO_DEVICE || result == NB_CUDA_INVALID_DEVICE;
    if (version < NB_CUDA_VERSION_MIN) {
        CHECK(rc == NB_ENOLIB && strstr(err.text, " is too old: ") != NULL, "version %d: %d, %s", version, rc,
              err.text);
    } else if (result != NB_CUDA_SUCCESS) {
        CHECK(rc == (no_device ? -ENODEV : -EIO), "cuInit gives %u: %d, %s", result, rc, err.text);
        CHECK(strncmp(err.text, "CUDA: cuInit: ", 14) == 0, "%s", err.text);
    } else {
        CHECK(rc == 0 && err.code == 0, "version %d: %d, %s", version, rc, err.text);
        check_opened(&driver, library, version);
    }
    CHECK(rc == 0 || (err.code == rc && driver.version == 0), "%d, recorded %d, version %d was set", rc, err.code,
          driver.version);
    dlclose(library);
}

// The fake driver as the usual library: a process that has loaded it finds it by its soname.
static void test_fake_as_usual_library(int version) {
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        const struct fake_controls *fake = fake_controls_get();
        fake->reset(1, 0);
        fake->set_version(version);
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        CHECK(library != NULL && dlsym(library, "fake_controls") != NULL, "the fake is not the usual library");
        test_usual_library();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "driver %d: status %x", version, (unsigned)status);
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
    test_fake_as_usual_library(FAKE_VERSION);
    test_fake_as_usual_library(NB_CUDA_VERSION_MIN);
    test_fake_as_usual_library(NB_CUDA_VERSION_MIN - 10);
    test_usual_library(); // in this process only now: a real driver stays loaded
    test_named_file_missing();
    test_another_library();
    return 0;
}
