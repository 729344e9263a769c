#include "tensors.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>

#include "device.hpp"

namespace late {

namespace {

constexpr size_t MOST_RANGES = 1 << 14;

thread_local const void* newest = nullptr;

at::Tensor with_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  void* memory = device().memory.alias(storage.data());
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(memory, c10::DeviceType::CPU), nullptr, false);
  at::Tensor made = with_storage(std::move(seen), c10::DispatchKey::CPU, tensor);
  if (tensor.requires_grad()) made.set_requires_grad(true);  // some kernels are chosen by it
  return made;
}

at::Tensor borrowed(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const c10::DataPtr& memory = storage.data_ptr();
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(memory.get(), memory.device()), nullptr, false);
  return with_storage(std::move(seen), c10::DispatchKey::PrivateUse1, tensor);
}

at::Tensor Shapes::of(const at::Tensor& tensor) {
  c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (!storage) {
    storage = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, c10::DeviceType::Meta),
                           c10::GetAllocator(c10::DeviceType::Meta), true);
  }
  return with_storage(storage, c10::DispatchKey::Meta, tensor);
}

void note_new(const at::TensorBase& tensor) { newest = tensor.storage().unsafeGetStorageImpl(); }

bool is_newest(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl() == newest; }

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

at::Tensor view_on_device(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType type) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                       c10::scalarTypeToTypeMeta(type));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.storage().data() == nullptr) return;
  const int64_t item = static_cast<int64_t>(tensor.itemsize());
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements beside each other
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) run += (dims[inner].second - 1) * dims[inner].first, ++inner;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * item;
  size_t ranges = 1;
  int64_t span = run;
  for (size_t d = inner; d < dims.size(); ++d) {
    ranges *= dims[d].second;
    span += (dims[d].second - 1) * dims[d].first;
  }
  if (ranges > MOST_RANGES) {
    accesses.push_back({begin, begin + span * item, write});
    return;
  }
  std::vector<int64_t> at(dims.size(), 0);
  for (size_t i = 0; i < ranges; ++i) {
    int64_t offset = 0;
    for (size_t d = inner; d < dims.size(); ++d) offset += at[d] * dims[d].first;
    const uintptr_t from = begin + offset * item;
    accesses.push_back({from, from + run * item, write});
    for (size_t d = inner; d < dims.size(); ++d) {
      if (++at[d] < dims[d].second) break;
      at[d] = 0;
    }
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const size_t kept = std::min(bytes, storage.nbytes());
  c10::DataPtr made = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(bytes);
  if (kept > 0) c10::GetAllocator(c10::DeviceType::PrivateUse1)->copy_data(made.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace late
