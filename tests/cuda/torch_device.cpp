// A device for torch over the CUDA driver named by NETBOTTLENECK_CUDA_LIBRARY, which is the fake one in tests. It is
// torch's PrivateUse1 device: its memory and its streams are the driver's, and it computes on the CPU, between copies.
//
// Memory that is freed goes to the next allocation of this size on the same stream, as with torch's caching allocator. As
// there, memory that was recorded as used on another stream has an event recorded on that stream when it is freed.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

extern "C" {
#include "cuda/driver.h"
}

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

void check(unsigned result) {
    TORCH_CHECK(result == NB_CUDA_SUCCESS, "the driver: ", result);
}

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
    }
};

// Its context is current in this thread.
const Driver &driver() {
    static const auto *made = new Driver();
    static thread_local const unsigned entered = made->context_push(made->context);
    check(entered);
    return *made;
}

// At first the driver's default stream, as with torch.cuda.
thread_local CUstream_st *current = nullptr;

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

void wait_for(CUstream_st *waits, CUstream_st *other) {
    CUevent_st *event = nullptr;
    check(driver().event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING));
    check(driver().event_record(event, other));
    check(driver().stream_wait_event(waits, event, 0));
    check(driver().event_destroy(event));
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
        wait_for(block->stream, user);
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
        auto found = unused.extract({bytes, stream});
        Block *block = found ? found.mapped() : new Block{0, bytes, stream, {}};
        if (!found) {
            check(driver().mem_alloc(&block->address, bytes));
        }
        return {reinterpret_cast<void *>(block->address), block, give_back, Device(TYPE, 0)};
    }
    void copy_data(void *, const void *, std::size_t) const override {
        TORCH_CHECK(false, "no copy");
    }
};

Memory memory;

// Streams.

struct Guard final : c10::impl::NoOpDeviceGuardImpl<TYPE> {
    Device exchangeDevice(Device) const override {
        return getDevice();
    }
    Device getDevice() const override {
        return Device(TYPE, 0);
    }
    Stream getStream(Device) const noexcept override {
        return wrapped(stream_now());
    }
    Stream getNewStream(Device, int) const override {
        CUstream_st *made = nullptr;
        check(driver().stream_create(&made, NB_CUDA_STREAM_NON_BLOCKING));
        return wrapped(made);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override {
        return getNewStream(device, 0);
    }
    Stream exchangeStream(Stream stream) const noexcept override {
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
            check(driver().event_create(made, NB_CUDA_EVENT_DISABLE_TIMING));
        }
        check(driver().event_record(*made, handle(stream)));
    }
    void block(void *event, const Stream &stream) const override {
        check(driver().stream_wait_event(handle(stream), static_cast<CUevent_st *>(event), 0));
    }
    bool queryEvent(void *event) const override {
        return driver().event_query(static_cast<CUevent_st *>(event)) == NB_CUDA_SUCCESS;
    }
    void destroyEvent(void *event, const DeviceIndex) const noexcept override {
        (void)driver().event_destroy(static_cast<CUevent_st *>(event));
    }
    void synchronizeStream(const Stream &stream) const override {
        check(driver().stream_synchronize(handle(stream)));
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
    bool isAvailable() const override {
        return true;
    }
    bool hasPrimaryContext(DeviceIndex) const override {
        return true;
    }
    // As FSDP2 does: all is freed, or there was nothing.
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        TORCH_CHECK(bytes == 0 || storage.nbytes() == 0, "no values are kept");
        storage.set_data_ptr_noswap(memory.allocate(bytes));
        storage.set_nbytes(bytes);
    }
};

// Copies, all on the current stream. From pageable memory: the driver takes the source at once, and blocks the other way.

void read(void *to, const Tensor &storage_owner) {
    const auto &storage = storage_owner.storage();
    std::optional<pybind11::gil_scoped_release> others_run; // the stream may wait for a thread of the script
    if (PyGILState_Check() != 0) {
        others_run.emplace();
    }
    if (storage.nbytes() > 0) {
        check(driver().copy_to_host(to, reinterpret_cast<nb_cuda_address>(storage.data()), storage.nbytes(),
                                    stream_now()));
    }
}

void write(const Tensor &to, const void *from, size_t bytes) {
    if (bytes > 0) {
        check(driver().copy_to_device(reinterpret_cast<nb_cuda_address>(to.data_ptr()), from, bytes, stream_now()));
    }
}

// The tensor in host memory, with the same strides over a copy of the storage.
Tensor to_host(const Tensor &tensor) {
    if (tensor.device().type() != TYPE) {
        return tensor;
    }
    const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
    Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    read(host.data_ptr(), tensor);
    return at::empty({0}, tensor.options().device(at::kCPU))
        .set_(host.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

Tensor copy_from(const Tensor &from, const Tensor &to, bool) {
    Tensor source = to_host(from);
    if (to.device().type() != TYPE) {
        return to.copy_(source);
    }
    Tensor host = to.is_contiguous() ? at::empty(to.sizes(), to.options().device(at::kCPU)) : to_host(to);
    host.copy_(source);
    // From its first to its last element: the driver may be writing to other parts of the storage.
    write(to, host.data_ptr(), at::detail::computeStorageNbytes(to.sizes(), to.strides(), to.element_size()));
    return to;
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    at::native::cpu_fallback(op, stack);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("resize_", at::native::resize_);
    m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    c10::register_privateuse1_backend("fakecuda");
    c10::SetAllocator(TYPE, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    m.def("new_stream", [] { return Guard().getNewStream(Device(TYPE, 0), 0).id(); });
    m.def("use_stream",
          [](int64_t stream) { return Guard().exchangeStream(wrapped(reinterpret_cast<CUstream_st *>(stream))).id(); });
    m.def("wait_stream", [](int64_t waits, int64_t other) {
        wait_for(reinterpret_cast<CUstream_st *>(waits), reinterpret_cast<CUstream_st *>(other));
    });
}
