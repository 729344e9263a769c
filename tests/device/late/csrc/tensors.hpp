// Tensors of the device seen in other ways: by the threads of its streams, by shape alone, by the bytes that they touch.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "order.hpp"

namespace late {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

// The same elements as the CPU's, at the address for threads of streams. Owns nothing.
at::Tensor host_view(const at::Tensor& tensor);
// The same elements on the device. Owns nothing: for work that was issued, while others hold or free the memory in a stream's order.
at::Tensor borrowed(const at::Tensor& tensor);
// The same sizes, strides and type without memory; tensors that share a storage share it here, too.
class Shapes {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// Notes a tensor that was just made on this thread; tells whether it is the latest.
void note_new(const at::TensorBase& tensor);
bool is_newest(const at::Tensor& tensor);

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);
at::Tensor view_on_device(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType type);

// The bytes that the tensor's elements take, as few ranges as there are; of very many one range around them all.
void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool write);

// Another size of a storage of the device; what was in it stays, copied on the current stream.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace late
