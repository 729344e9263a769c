// Autocast on the device, by PyTorch's own lists of operators: one boxed kernel for each policy.

#include <ATen/autocast_mode.h>

namespace late {

namespace {

constexpr auto HERE = c10::DeviceType::PrivateUse1;

at::IValue cast(const at::IValue& value, at::ScalarType type) {
  if (value.isTensor()) return value.toTensor().defined() ? at::IValue(at::autocast::cached_cast(type, value.toTensor(), HERE)) : value;
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(at::autocast::cached_cast(type, tensor, HERE));
    return made;
  }
  return value;
}

template <typename Change>
void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Change& change) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < arguments; ++i) {
    at::IValue& value = torch::jit::peek(*stack, i, arguments);
    value = change(value, op.schema().arguments()[i]);
  }
  op.callBoxed(stack);
}

void to_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::ScalarType type = at::autocast::get_autocast_dtype(HERE);
  call(op, stack, [&](const at::IValue& value, const c10::Argument&) { return cast(value, type); });
}

void to_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call(op, stack, [&](const at::IValue& value, const c10::Argument&) { return cast(value, at::kFloat); });
}

void to_float_result(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::IValue& first = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  const bool casts = first.isTensor() && at::autocast::is_autocast_eligible(first.toTensor(), HERE) && first.toTensor().is_floating_point();
  call(op, stack, [&](const at::IValue& value, const c10::Argument& argument) {
    return casts && argument.name() == "dtype" && value.isNone() ? at::IValue(at::kFloat) : value;
  });
}

void to_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::ScalarType widest = at::autocast::get_autocast_dtype(HERE);
  for (const at::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) widest = at::autocast::prioritize(widest, value.toTensor(), HERE);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) widest = at::autocast::prioritize(widest, tensor, HERE);
  }
  call(op, stack, [&](const at::IValue& value, const c10::Argument&) { return cast(value, widest); });
}

std::string named(const char* name, const char* overload = nullptr) {
  return overload == nullptr ? name : std::string(name) + "." + overload;
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LATE_NAME_1(name) named(#name),
#define LATE_NAME_2(name, overload) named(#name, #overload),
#define LATE_PICK(_1, _2, pick, ...) pick
#define LATE_NAME(...) LATE_PICK(__VA_ARGS__, LATE_NAME_2, LATE_NAME_1)(__VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const std::string& name : {AT_FORALL_LOWER_PRECISION_FP(LATE_NAME)})
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&to_lower_precision>());
  for (const std::string& name : {AT_FORALL_FP32(LATE_NAME)})
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&to_float>());
  for (const std::string& name : {AT_FORALL_FP32_SET_OPT_DTYPE(LATE_NAME)})
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&to_float_result>());
  for (const std::string& name : {AT_FORALL_PROMOTE(LATE_NAME)})
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&to_widest>());
}

}  // namespace

}  // namespace late
