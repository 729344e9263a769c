#include "settings.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace late {

Settings Settings::here() { return {at::get_num_threads(), at::GradMode::is_enabled()}; }

void Settings::apply() const {
  if (at::get_num_threads() != threads) at::set_num_threads(threads);
  at::GradMode::set_enabled(grad);
}

void thread_settings() {
  auto excluded = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  auto local = c10::impl::tls_local_dispatch_key_set();
  local.excluded_ = local.excluded_ | excluded;
  c10::impl::_force_tls_local_dispatch_key_set(local);
}

}  // namespace late
