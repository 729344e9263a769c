#include "fallback.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "device.hpp"
#include "generator.hpp"
#include "tensors.hpp"

namespace late {

namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

const c10::Device HERE(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet CPU(c10::DispatchKey::CPU);
const c10::DispatchKeySet META(c10::DispatchKey::Meta);

// What the schema says of an operator.
struct Facts {
  std::string name;
  std::vector<bool> written;     // by argument
  std::vector<bool> outs;        // by argument: written, and without meaning before
  std::vector<int> returned;     // by return: the argument that is returned, -1 for a new tensor, -2 for a view of the first argument
  int generator = -1;            // argument
  bool host = false;             // the host needs the result, or its size
  bool takes_host_indices = false;
};

Facts read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Facts facts;
  facts.name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  TORCH_CHECK_NOT_IMPLEMENTED(facts.name.rfind("aten::", 0) == 0 || facts.name.rfind("prims::", 0) == 0, facts.name,
                              " has no kernel for device late; only PyTorch's own operators run by their CPU kernels");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    facts.written.push_back(written);
    facts.outs.push_back(written && argument.is_out());
    if (argument.name() == "generator") facts.generator = static_cast<int>(i);
  }
  facts.host = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (const c10::Argument& result : schema.returns()) {
    const std::string type = result.type()->str();
    if (type != "Tensor" && type != "Tensor[]" && type != "List[Tensor]") facts.host = true;
    int returned = -1;
    if (result.alias_info() != nullptr) {
      returned = -2;
      for (size_t i = 0; i < schema.arguments().size() && result.alias_info()->isWrite(); ++i) {
        const auto* from = schema.arguments()[i].alias_info();
        if (from != nullptr && from->isWrite() && from->beforeSets() == result.alias_info()->beforeSets()) returned = static_cast<int>(i);
      }
    }
    facts.returned.push_back(returned);
  }
  if (schema.name() == "aten::index") facts.host = false;  // masks are replaced before
  facts.takes_host_indices = schema.name().find("index") != std::string::npos;
  return facts;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Facts>>;
  const std::lock_guard lock(mutex);
  auto& facts = (*known)[&op.schema()];
  if (!facts) facts = std::make_unique<Facts>(read(op));
  return *facts;
}

// `value` with each tensor in it replaced by what `change` makes of it.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(tensor.defined() ? change(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor.has_value() && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return made;
  }
  return value;
}

template <typename See>
void each_tensor(const IValue& value, const See& see) {
  changed(value, [&](const Tensor& tensor) {
    see(tensor);
    return tensor;
  });
}

// Calls a kernel. PyTorch's adapter of kernels that return several of their arguments drops these before it reads them: held meanwhile.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack& stack) {
  const Stack held = stack;
  op.redispatchBoxed(keys, &stack);
}

Tensor empty_cpu(const Tensor& like) {
  return at::detail::make_tensor<c10::TensorImpl>(
             c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kCPU), true), CPU, like.dtype())
      .resize_(like.sizes());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), facts_(facts_of(op)), stack_(stack) {
    const auto given = torch::jit::last(*stack, op.schema().arguments().size());
    arguments_.assign(given.begin(), given.end());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      arguments_[i] = changed(arguments_[i], [&](const Tensor& t) { return placed(t, i); });
      if (arguments_[i].isOptionalTensorList()) arguments_[i] = without_masks(arguments_[i].toOptionalTensorVector());
    }
  }

  void run() {
    const bool known = !facts_.host && op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    if (!known) return run_for_host();
    if (composed_around_out()) {
      for (const int returned : facts_.returned) results_.push_back(arguments_[returned]);
    } else if (!infer()) {
      return run_for_host();
    }
    if (is_view()) return finish();
    Stack cpu = for_cpu();
    if (facts_.generator >= 0 && draw(cpu)) return finish();
    issue([op = op_, cpu = std::move(cpu), targets = targets_]() mutable {
      call(op, CPU, cpu);
      for (const auto& [at, target] : targets) {
        const IValue& result = cpu.at(at.first);
        const Tensor value = result.isTensor() ? result.toTensor() : result.toTensorVector().at(at.second);
        if (value.numel() == 0) continue;  // statistics that nobody reads
        TORCH_CHECK(value.sizes() == target.sizes(), "PyTorch's kernel for shapes says ", target.sizes(), ", the CPU's ", value.sizes());
        target.copy_(value);
      }
    });
    finish();
  }

 private:
  // An argument as the kernels may see it: scalars of the host by value, indices of the host copied over, other tensors of the host refused.
  Tensor placed(const Tensor& tensor, size_t argument) const {
    if (on_device(tensor)) {
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, facts_.name, " on device late takes strided tensors only");
      return tensor;
    }
    TORCH_CHECK(tensor.device().is_cpu() && !facts_.written[argument] && (tensor.dim() == 0 || facts_.takes_host_indices),
                "Expected all tensors to be on the same device, but ", facts_.name, " got argument ",
                op_.schema().arguments()[argument].name(), " on ", tensor.device(), ", different from other tensors on ", HERE);
    if (tensor.dim() > 0) return tensor.to(HERE);
    Tensor value = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
    return value;
  }

  // Masks among indices as the numbers of their elements, which the host has to wait for.
  static IValue without_masks(const std::vector<std::optional<Tensor>>& indices) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& index : indices) {
      if (!index.has_value() || !index->defined() || (index->scalar_type() != at::kBool && index->scalar_type() != at::kByte)) {
        made.push_back(index);
        continue;
      }
      const Tensor found = index->nonzero();
      for (int64_t d = 0; d < index->dim(); ++d) made.push_back(found.select(1, d));
    }
    return made;
  }

  IValue elsewhere(const IValue& value, c10::DeviceType device) const {
    if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(device);
    return value;
  }

  // PyTorch composes `add` and `add_` of the shape, found in C++, and `add.out`. What it just made, or an input, is as large as it has to
  // be: asking for the shape again, in Python, would take most of the time of the call.
  bool composed_around_out() const {
    size_t found = 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!facts_.outs[i]) continue;
      if (!arguments_[i].isTensor() || !on_device(arguments_[i].toTensor()) || ++found > 1) return false;
      const Tensor& out = arguments_[i].toTensor();
      bool right = out.numel() > 0 && is_newest(out);
      for (size_t j = 0; j < arguments_.size(); ++j) right |= j != i && arguments_[j].isTensor() && arguments_[j].toTensor().is_same(out);
      if (!right) return false;
    }
    for (const int returned : facts_.returned)
      if (returned < 0) return false;
    return found == 1;
  }

  // Asks PyTorch's kernels without memory for the results' shapes; makes the results. False where there is no such kernel, and it matters.
  bool infer() {
    Stack shapes;
    Shapes seen;
    for (const IValue& value : arguments_) {
      shapes.push_back(value.isGenerator() ? IValue()
                                           : elsewhere(changed(value, [&](const Tensor& t) { return on_device(t) ? seen.of(t) : t; }),
                                                       c10::DeviceType::Meta));
    }
    const Stack given = shapes;
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      call(op_, META, shapes);
    } catch (const c10::NotImplementedError&) {
      for (const int returned : facts_.returned)
        if (returned < 0) return false;
      for (const int returned : facts_.returned) results_.push_back(arguments_[returned]);
      return true;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      if (!facts_.outs[i] || !arguments_[i].isTensor() || !arguments_[i].toTensor().defined()) continue;
      const Tensor& out = arguments_[i].toTensor();
      const Tensor& shape = given[i].toTensor();
      if (out.sizes() != shape.sizes()) {
        out.resize_(shape.sizes());
        out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
      }
    }
    for (size_t i = 0; i < facts_.returned.size(); ++i) {
      if (facts_.returned[i] >= 0) {
        results_.push_back(arguments_[facts_.returned[i]]);
        continue;
      }
      size_t element = 0;
      results_.push_back(changed(shapes.at(i), [&](const Tensor& shape) {
        if (facts_.returned[i] == -2)
          return view_on_device(arguments_[0].toTensor(), shape.sizes(), shape.strides(), shape.storage_offset(), shape.scalar_type());
        Tensor made = empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type());
        if (made.numel() > 0) targets_.emplace_back(std::make_pair(i, element), host_view(made));
        add_accesses(accesses_, made, true);
        bytes_ += made.nbytes();
        ++element;
        return made;
      }));
    }
    return true;
  }

  bool is_view() const {
    for (const int returned : facts_.returned)
      if (returned == -2) return true;
    return false;
  }

  Stack for_cpu() {
    Stack cpu;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      cpu.push_back(elsewhere(changed(arguments_[i],
                                      [&](const Tensor& tensor) {
                                        if (!on_device(tensor)) return tensor;
                                        if (!facts_.outs[i]) add_accesses(accesses_, tensor, false);
                                        if (facts_.written[i]) add_accesses(accesses_, tensor, true);
                                        bytes_ += tensor.nbytes();
                                        return host_view(tensor);
                                      }),
                              c10::DeviceType::CPU));
    }
    return cpu;
  }

  // Random numbers are drawn in the order of issue. Returns true where the numbers themselves are the result; else the stream draws them,
  // from the generator as it is now, and the generator goes on as far as the operator will draw.
  bool draw(Stack& cpu) {
    const IValue& given = arguments_[facts_.generator];
    const at::Generator generator = host_generator(given.isGenerator() ? given.toGenerator() : default_generator());
    bool reads = !targets_.empty();
    for (size_t i = 0; i < arguments_.size(); ++i) each_tensor(arguments_[i], [&](const Tensor&) { reads |= !facts_.written[i]; });
    if (reads) cpu[facts_.generator] = generator.clone();
    Stack here;
    std::vector<std::pair<Tensor, Tensor>> drawn;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      here.push_back(elsewhere(changed(arguments_[i],
                                       [&](const Tensor& tensor) {
                                         if (!on_device(tensor)) return tensor;
                                         Tensor stand_in = empty_cpu(tensor);
                                         if (reads) stand_in.fill_(tensor.is_floating_point() ? 0.5 : 1.0);
                                         if (!reads) drawn.emplace_back(host_view(tensor), stand_in);
                                         return stand_in;
                                       }),
                               c10::DeviceType::CPU));
    }
    here[facts_.generator] = generator;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      call(op_, CPU, here);
    }
    if (reads) return false;
    issue([drawn = std::move(drawn)] {
      for (const auto& [target, value] : drawn) target.copy_(value);
    });
    return true;
  }

  void issue(std::function<void()> work) {
    device().streams.issue(current_stream(), {facts_.name, std::move(work), std::move(accesses_), bytes_});
  }

  // The host waits for the result.
  void run_for_host() {
    auto cpu = std::make_shared<Stack>(for_cpu());
    std::vector<std::pair<size_t, Tensor>> outs;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (facts_.outs[i] && arguments_[i].isTensor() && on_device(arguments_[i].toTensor())) {
        outs.emplace_back(i, arguments_[i].toTensor());
        (*cpu)[i] = empty_cpu(arguments_[i].toTensor());
      }
    }
    const Stack given = *cpu;
    issue([op = op_, cpu] { call(op, CPU, *cpu); });
    device().streams.host_wait(device().streams.record(current_stream()), "operators that the host waits for", facts_.name);
    for (const auto& [i, out] : outs) {
      out.resize_(given[i].toTensor().sizes());
      put(given[i].toTensor(), out);
    }
    for (size_t i = 0; i < facts_.returned.size(); ++i) {
      if (facts_.returned[i] >= 0) {
        results_.push_back(arguments_[facts_.returned[i]]);
        continue;
      }
      results_.push_back(changed(cpu->at(i), [&](const Tensor& value) {
        Tensor made = empty_on_device(value.sizes(), value.strides(), value.scalar_type());
        put(value, made);
        return made;
      }));
    }
    finish();
  }

  void put(const Tensor& value, const Tensor& into) {
    if (into.numel() == 0) return;
    std::vector<Access> accesses;
    add_accesses(accesses, into, true);
    device().streams.issue(current_stream(), {facts_.name, [value, target = host_view(into)] { target.copy_(value); }, std::move(accesses)});
  }

  void finish() {
    torch::jit::drop(*stack_, op_.schema().arguments().size());
    for (IValue& result : results_) stack_->push_back(std::move(result));
  }

  const c10::OperatorHandle op_;
  const Facts& facts_;
  Stack* stack_;
  Stack arguments_;
  Stack results_;
  std::vector<std::pair<std::pair<size_t, size_t>, Tensor>> targets_;  // (return, element of its list), where its values go
  std::vector<Access> accesses_;
  size_t bytes_ = 0;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

void prefer_cpu_kernels() {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  static const std::set<std::string> composed = {"aten::convolution", "aten::convolution_backward", "aten::index.Tensor"};
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const bool both = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                         (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
    if (!both && composed.count(name.name) + composed.count(toString(name)) == 0) continue;
    registered->push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                  c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr,
                                                  "device late"));
  }
}

}  // namespace late
