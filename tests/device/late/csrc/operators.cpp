// Operators that no fallback can do: memory, copies, views of storages, dropout; and where the fallback is registered.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <torch/library.h>

#include <cstring>

#include "device.hpp"
#include "fallback.hpp"
#include "generator.hpp"
#include "tensors.hpp"

namespace late {

namespace {

using at::Tensor;

c10::Allocator* allocator() { return c10::GetAllocator(c10::DeviceType::PrivateUse1); }

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  Tensor made = at::detail::empty_generic(sizes, allocator(), KEYS, at::dtype_or_default(type), format);
  note_new(made);
  return made;
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  Tensor made = at::detail::empty_strided_generic(sizes, strides, allocator(), KEYS, at::dtype_or_default(type));
  note_new(made);
  return made;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  const size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return at::cpu::set_(self, none, 0, {0}, {});
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::cpu::set_(self, std::move(source), 0, {size}, {});
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

uint64_t checksum(const Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  uint64_t sum = 0;
  size_t at = 0;
  for (uint64_t word = 0; at + 8 <= tensor.nbytes(); at += 8) {
    memcpy(&word, bytes + at, 8);
    sum = (sum ^ word) * 0x9e3779b97f4a7c15;
    sum ^= sum >> 29;
  }
  for (; at < tensor.nbytes(); ++at) sum = (sum ^ bytes[at]) * 0x9e3779b97f4a7c15;
  return sum;
}

// Copies as CUDA does them: where types or strides differ, the host's side is converted on the host in memory that is not pinned. What
// the host waits for: blocking copies, and those whose side on the host is not pinned.
Tensor copy_from(const Tensor& self, const Tensor& into, bool non_blocking) {
  if (into.numel() == 0) return into;
  Tensor from = self.expand_as(into);
  const bool out = !on_device(into);
  const bool in = !on_device(from);
  const bool alike = from.dtype() == into.dtype() && from.strides() == into.strides() && from.is_conj() == into.is_conj() &&
                     from.is_neg() == into.is_neg() && from.is_non_overlapping_and_dense();
  Tensor target = out ? into : host_view(into);
  if (in && !alike) from = at::empty_like(into, at::TensorOptions().device(c10::kCPU)).copy_(from);
  std::vector<Access> accesses;
  add_accesses(accesses, from, false);
  add_accesses(accesses, into, true);
  const bool pinned = !(in && !device().pinned.contains(from.storage().data())) &&
                      !(out && (!device().pinned.contains(into.storage().data()) || !into.is_non_overlapping_and_dense()));
  const bool waits = (in || out) && (!non_blocking || !pinned);
  const char* name = in ? "copy to device" : out ? "copy to host" : "aten::copy_";
  if (out && into.is_non_overlapping_and_dense()) {  // until it is there, nothing is
    device().streams.issue(current_stream(), {name, [into] { memset(into.mutable_data_ptr(), POISON, into.nbytes()); }, {}, 0, true});
  }
  std::optional<uint64_t> sum;  // of what no stream will change before the copy; so the host should not, either
  const auto begin = reinterpret_cast<uintptr_t>(from.const_data_ptr());
  if (in && !waits && device().streams.host_knows_writes(begin, begin + from.nbytes())) sum = checksum(from);
  device().streams.issue(current_stream(), {name,
                                            [source = in ? from : host_view(from), target, sum] {
                                              if (sum.has_value() && *sum != checksum(source))
                                                device().counters.defect("sources changed before their copy", source.toString());
                                              target.copy_(source);
                                            },
                                            std::move(accesses), into.nbytes()});
  if (waits) {
    if (non_blocking) device().counters.add("copies of unpinned memory", name);
    device().streams.host_wait(device().streams.record(current_stream()), "blocking copies", name);
  }
  return into;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& into) {
  into.resize_(self.sizes());
  return copy_from(self, into, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  device().counters.add("record_stream");
  device().memory.used_by(const_cast<void*>(self.storage().data()), static_cast<size_t>(stream.id()));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::TensorOptions().dtype(at::kBool))};
  const double kept = 1 - p;
  Tensor mask = at::empty_like(input, at::TensorOptions().dtype(at::kBool)).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1. / kept), mask};
}

// PyTorch takes `native_dropout` on devices, and noise on the CPU, with other bits: here as on the CPU. Traced, it is `native_dropout` on
// both.
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (input.key_set().has(c10::DispatchKey::Python)) return std::get<0>(at::native_dropout(input, p, train));
  if (p == 1) return input.mul(0);
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// The kernel that PyTorch takes on the CPU for tensors of these shapes, among those that it lets the CPU have.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
                         bool causal, std::optional<double> scale, bool grouped) {
  const auto of_host = [](const Tensor& tensor) {
    c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU), nullptr, false);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(none), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    std::vector<int64_t> sizes, strides;
    for (const c10::SymInt& size : tensor.sym_sizes()) sizes.push_back(size.guard_int(__FILE__, __LINE__));
    for (const c10::SymInt& stride : tensor.sym_strides()) strides.push_back(stride.guard_int(__FILE__, __LINE__));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    if (tensor.requires_grad()) made.set_requires_grad(true);
    return made;
  };
  const std::optional<Tensor> host_mask = mask.has_value() && mask->defined() ? std::optional(of_host(*mask)) : std::nullopt;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  return at::_fused_sdp_choice(of_host(query), of_host(key), of_host(value), host_mask, dropout, causal, scale, grouped);
}

// PyTorch 2.13 does not ask the hooks, and would give a model other parameters where it moves to the device. CUDA's stay the same.
bool may_take_data_of(const Tensor& self, const Tensor& from) {
  const auto plain = [](const Tensor& tensor) {
    return (tensor.device().is_cpu() || tensor.device().is_privateuseone()) && tensor.layout() == c10::kStrided &&
           !tensor.is_quantized() && !tensor.key_set().has(c10::DispatchKey::Python);
  };
  return self.key_set() == from.key_set() || (plain(self) && plain(from));
}

// Of a tensor of the device, on a thread of its streams: the tensor that kernels of the CPU and gloo can take.
Tensor host_view_op(const Tensor& self) {
  TORCH_CHECK(Streams::on_stream_thread(), "late::host_view is for the threads of streams");
  return host_view(self);
}

std::optional<at::Generator> generator() { return default_generator(); }

TORCH_LIBRARY(late, m) {
  m.def("host_view(Tensor self) -> Tensor");
  m.def("borrowed(Tensor self) -> Tensor");
  m.def("default_generator() -> Generator?", &generator);
}

TORCH_LIBRARY_IMPL(late, PrivateUse1, m) {
  m.impl("host_view", &host_view_op);
  m.impl("borrowed", &borrowed);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("dropout", &dropout);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

// The copy itself resolves conjugated and negated views.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", &dropout);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

}  // namespace

}  // namespace late

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::attention_choice)

}  // namespace at::native
