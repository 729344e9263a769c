#include "generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/TensorImpl.h>

namespace late {

namespace {

const c10::Device HERE(c10::DeviceType::PrivateUse1, 0);

struct LateGenerator final : c10::GeneratorImpl {
  explicit LateGenerator(at::Generator host)
      : GeneratorImpl(HERE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of device late has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a generator of device late has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  LateGenerator* clone_impl() const override { return new LateGenerator(host.clone()); }

  at::Generator host;
};

}  // namespace

const at::Generator& default_generator() {
  static const auto* made = new at::Generator(new_generator());
  return *made;
}

at::Generator new_generator() { return at::make_generator<LateGenerator>(at::detail::createCPUGenerator()); }

at::Generator host_generator(const at::Generator& generator) {
  auto* impl = dynamic_cast<LateGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK_VALUE(impl != nullptr, "Expected a 'late' device type for generator but found '", generator.device().type(), "'");
  return impl->host;
}

}  // namespace late
