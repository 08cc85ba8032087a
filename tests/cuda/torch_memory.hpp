// Memory and streams of the torch device of torch_device.cpp, over the CUDA driver that NETBOTTLENECK_CUDA_LIBRARY names.
//
// Memory that is freed goes to the next allocation of this size on the same stream, as with torch's caching allocator. As
// there, memory that was recorded as used on another stream has an event recorded on that stream when it is freed.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>

extern "C" {
#include "cuda/driver.h"
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct Driver {
#define MEMBER(member, symbol, parameters) unsigned(*member) parameters;
    NB_CUDA_CALLS(MEMBER)
    CUctx_st *context = nullptr;

    Driver() {
        void *library = dlopen(getenv("NETBOTTLENECK_CUDA_LIBRARY"), RTLD_NOW);
        TORCH_CHECK(library != nullptr, "no driver: ", dlerror());
#define LOADED(member, symbol, parameters) *reinterpret_cast<void **>(&member) = dlsym(library, #symbol);
        NB_CUDA_CALLS(LOADED)
        check(init(0));
        check(primary_retain(&context, 0));
        enter();
    }

    static void check(unsigned result) {
        TORCH_CHECK(result == NB_CUDA_SUCCESS, "the driver: ", result);
    }

    // Makes the context current in this thread, once.
    void enter() {
        static thread_local bool entered = false;
        if (!entered) {
            check(context_push(context));
            entered = true;
        }
    }
};

Driver &driver() {
    static auto *made = new Driver();
    made->enter();
    return *made;
}

// As with torch.cuda, the default stream is the driver's, which is named NULL.
constexpr CUstream_st *DEFAULT = nullptr;
thread_local CUstream_st *current = DEFAULT;

CUstream_st *stream_now() {
    (void)driver(); // makes the context current in this thread
    return current;
}

CUstream_st *handle(const Stream &stream) {
    return reinterpret_cast<CUstream_st *>(stream.id());
}

Stream wrapped(CUstream_st *stream) {
    return Stream(Stream::UNSAFE, Device(TYPE, 0), reinterpret_cast<c10::StreamId>(stream));
}

// Memory.

struct Block {
    nb_cuda_address address;
    size_t bytes;
    CUstream_st *stream;
    std::set<CUstream_st *> users; // other streams
};

std::mutex lock;
std::multimap<std::pair<size_t, CUstream_st *>, Block *> unused;

void give_back(void *context) {
    auto *block = static_cast<Block *>(context);
    std::lock_guard<std::mutex> held(lock);
    for (CUstream_st *user : std::exchange(block->users, {})) {
        CUevent_st *event = nullptr;
        Driver::check(driver().event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING));
        Driver::check(driver().event_record(event, user));
        Driver::check(driver().stream_wait_event(block->stream, event, 0));
        Driver::check(driver().event_destroy(event));
    }
    unused.emplace(std::make_pair(block->bytes, block->stream), block);
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes == 0) {
            return {nullptr, Device(TYPE, 0)};
        }
        CUstream_st *stream = stream_now();
        std::lock_guard<std::mutex> held(lock);
        auto found = unused.find({bytes, stream});
        Block *block = nullptr;
        if (found != unused.end()) {
            block = found->second;
            unused.erase(found);
        } else {
            block = new Block{0, bytes, stream, {}};
            Driver::check(driver().mem_alloc(&block->address, bytes));
        }
        return {reinterpret_cast<void *>(block->address), block, give_back, Device(TYPE, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return give_back;
    }
    void copy_data(void *, const void *, std::size_t) const override {
        TORCH_CHECK(false, "no copy");
    }
};

Memory memory;

// Streams.

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return TYPE;
    }
    Device exchangeDevice(Device) const override {
        return getDevice();
    }
    Device getDevice() const override {
        return Device(TYPE, 0);
    }
    void setDevice(Device) const override {
    }
    void uncheckedSetDevice(Device) const noexcept override {
    }
    DeviceIndex deviceCount() const noexcept override {
        return 1;
    }
    Stream getStream(Device) const override {
        return wrapped(stream_now());
    }
    Stream getDefaultStream(Device) const override {
        return wrapped(DEFAULT);
    }
    Stream getNewStream(Device, int) const override {
        CUstream_st *made = nullptr;
        Driver::check(driver().stream_create(&made, NB_CUDA_STREAM_NON_BLOCKING));
        return wrapped(made);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override {
        return getNewStream(device, 0);
    }
    Stream exchangeStream(Stream stream) const override {
        Stream before = wrapped(stream_now());
        current = handle(stream);
        return before;
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return handle(stream);
    }
    void record(void **event, const Stream &stream, const DeviceIndex, const c10::EventFlag) const override {
        auto **made = reinterpret_cast<CUevent_st **>(event);
        if (*made == nullptr) {
            Driver::check(driver().event_create(made, NB_CUDA_EVENT_DISABLE_TIMING));
        }
        Driver::check(driver().event_record(*made, handle(stream)));
    }
    void block(void *event, const Stream &stream) const override {
        Driver::check(driver().stream_wait_event(handle(stream), static_cast<CUevent_st *>(event), 0));
    }
    bool queryEvent(void *event) const override {
        return driver().event_query(static_cast<CUevent_st *>(event)) == NB_CUDA_SUCCESS;
    }
    void destroyEvent(void *event, const DeviceIndex) const noexcept override {
        (void)driver().event_destroy(static_cast<CUevent_st *>(event));
    }
    void synchronizeStream(const Stream &stream) const override {
        Driver::check(driver().stream_synchronize(handle(stream)));
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &stream) const override {
        auto *block = data.get_deleter() == give_back ? static_cast<Block *>(data.get_context()) : nullptr;
        if (block != nullptr && block->stream != handle(stream)) {
            std::lock_guard<std::mutex> held(lock);
            block->users.insert(handle(stream));
        }
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return true;
    }
    bool hasPrimaryContext(DeviceIndex) const override {
        return true;
    }
    DeviceIndex deviceCount() const override {
        return 1;
    }
    DeviceIndex getCurrentDevice() const override {
        return 0;
    }
    // As FSDP2 does: all is freed, or there was nothing.
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        TORCH_CHECK(bytes == 0 || storage.nbytes() == 0, "no values are kept");
        storage.set_data_ptr_noswap(memory.allocate(bytes));
        storage.set_nbytes(bytes);
    }
};

} // namespace
