// A device for torch over the CUDA driver named by NETBOTTLENECK_CUDA_LIBRARY, which is the fake one in tests. It is
// torch's PrivateUse1 device: its memory and its streams are the driver's, and it computes on the CPU, between copies.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "torch_memory.hpp"

namespace {

using at::Tensor;

// Copies, all on the current stream. From pageable memory: the driver takes the source at once, and blocks the other way.

void read(void *to, const Tensor &storage_owner) {
    const auto &storage = storage_owner.storage();
    std::optional<pybind11::gil_scoped_release> others_run; // the stream may wait for a thread of the script
    if (PyGILState_Check() != 0) {
        others_run.emplace();
    }
    if (storage.nbytes() > 0) {
        Driver::check(driver().copy_to_host(to, reinterpret_cast<nb_cuda_address>(storage.data()), storage.nbytes(),
                                            stream_now()));
    }
}

void write(const Tensor &to, const void *from, size_t bytes) {
    if (bytes > 0) {
        Driver::check(
            driver().copy_to_device(reinterpret_cast<nb_cuda_address>(to.data_ptr()), from, bytes, stream_now()));
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
        to.copy_(source);
    } else if (to.is_contiguous()) {
        Tensor plain = source.to(to.scalar_type()).expand(to.sizes()).contiguous();
        write(to, plain.data_ptr(), plain.nbytes());
    } else {
        Tensor host = to_host(to);
        host.copy_(source);
        // From its first to its last element: the driver may be writing to other parts of the storage.
        write(to, host.data_ptr(), at::detail::computeStorageNbytes(to.sizes(), to.strides(), to.element_size()));
    }
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

const Tensor &resize(const Tensor &self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
    auto size = C10_AS_INTARRAYREF_SLOW(sizes);
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    const size_t bytes = static_cast<size_t>(self.numel()) * self.element_size();
    if (self.storage().nbytes() < bytes) {
        impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), bytes, &memory, true));
    }
    return self;
}

Tensor &set_storage(Tensor &self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                offset.guard_int(__FILE__, __LINE__));
    return self;
}

Tensor &set_tensor(Tensor &self, const Tensor &other) {
    return set_storage(self, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
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
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    c10::register_privateuse1_backend("fakecuda");
    c10::SetAllocator(TYPE, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    m.def("new_stream", [] { return reinterpret_cast<int64_t>(handle(Guard().getNewStream(Device(TYPE, 0), 0))); });
    m.def("use_stream", [](int64_t stream) {
        auto *before = stream_now();
        current = reinterpret_cast<CUstream_st *>(stream);
        return reinterpret_cast<int64_t>(before);
    });
    m.def("wait_stream", [](int64_t waits, int64_t other) {
        void *event = nullptr;
        Guard().record(&event, wrapped(reinterpret_cast<CUstream_st *>(other)), 0, c10::EventFlag::PYTORCH_DEFAULT);
        Guard().block(event, wrapped(reinterpret_cast<CUstream_st *>(waits)));
        Guard().destroyEvent(event, 0);
    });
}
