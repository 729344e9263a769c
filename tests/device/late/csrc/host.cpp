#include "host.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>

#include <mutex>
#include <unordered_map>

#include "device.hpp"
#include "tensors.hpp"

namespace late {

namespace {

using at::IValue;
using at::Tensor;

enum class Use { NONE, READ, WRITE };

// What the schema says of an operator: by argument. Views and shapes use no memory, and a conversion is done by operators of its own.
std::vector<Use> read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  std::vector<Use> uses(schema.arguments().size(), Use::READ);
  const std::string& name = schema.name();
  if (op.hasTag(at::Tag::inplace_view) || name.find("_like") != std::string::npos || name.rfind("aten::new_", 0) == 0 ||
      name.rfind("aten::set_", 0) == 0 || name.rfind("aten::resize", 0) == 0 || name.rfind("aten::is_", 0) == 0 ||
      name.rfind("aten::sym_", 0) == 0 || name == "aten::_to_copy" || name == "aten::result_type" || name == "aten::requires_grad_" || name == "aten::record_stream") {
    return std::vector<Use>(uses.size(), Use::NONE);
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr) uses[i] = alias->isWrite() ? Use::WRITE : Use::NONE;
  }
  return uses;
}

const std::vector<Use>& uses_of(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, std::vector<Use>>;
  const std::lock_guard lock(mutex);
  const auto found = known->find(name);
  if (found != known->end()) return found->second;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return (*known)[name] = op.has_value() ? read(*op) : std::vector<Use>();
}

template <typename See>
void each_tensor(const IValue& value, const See& see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) see(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor.has_value()) see(*tensor);
  }
}

bool is_pinned(const Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return tensor.defined() && tensor.is_cpu() && keys.has(c10::DispatchKey::CPU) && !keys.has(c10::DispatchKey::Python) &&
         tensor.has_storage() && tensor.storage().data() != nullptr && device().pinned.contains(tensor.storage().data());
}

// Nothing where the device has a part in it: then it is work of a stream.
std::unique_ptr<at::ObserverContext> called(const at::RecordFunction& function) {
  if (Streams::on_stream_thread() || device_or_null() == nullptr || device().pinned.bytes() == 0) return nullptr;
  bool pinned = false, there = false;
  for (const IValue& input : function.inputs()) {
    each_tensor(input, [&](const Tensor& tensor) {
      there |= on_device(tensor);
      pinned |= !there && is_pinned(tensor);
    });
  }
  const auto name = function.operator_name();
  if (!pinned || there || !name.has_value()) return nullptr;
  const std::vector<Use>& uses = uses_of(*name);
  std::vector<Access> accesses;
  for (size_t i = 0; i < std::min(uses.size(), function.inputs().size()); ++i) {
    if (uses[i] == Use::NONE) continue;
    each_tensor(function.inputs()[i], [&](const Tensor& tensor) {
      if (is_pinned(tensor)) add_accesses(accesses, tensor, uses[i] == Use::WRITE);
    });
  }
  if (!accesses.empty()) device().streams.host_access(name->overload_name.empty() ? name->name : name->name + "." + name->overload_name, accesses);
  return nullptr;
}

}  // namespace

void watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&called).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace late
