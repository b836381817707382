// Every operator of the emulated device that copies.cpp does not have: the CPU's kernel, over the same memory.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/resize_native.h>
#include <torch/library.h>

#include <unordered_set>
#include <vector>

#include "generators.h"
#include "order.h"
#include "tensors.h"

namespace emulated {

using torch::jit::Stack;

// What the host waits for on CUDA, since the shape of the result depends on the values.
static const std::unordered_set<std::string> WAITING = {
    "aten::nonzero", "aten::equal",  "aten::masked_select",     "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::argwhere", "aten::allclose", "aten::multinomial"};

// What raises on CUDA under torch.use_deterministic_algorithms(True), as torch's documents list it.
static const std::unordered_set<std::string> UNORDERED = {
    "aten::kthvalue", "aten::put_", "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward", "aten::max_pool3d_with_indices_backward", "aten::upsample_linear1d_backward",
    "aten::upsample_bicubic2d_backward", "aten::upsample_trilinear3d_backward", "aten::reflection_pad1d_backward",
    "aten::replication_pad1d_backward", "aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward", "aten::nll_loss2d_forward"};
static const std::unordered_set<std::string> UNORDERED_FLOATS = {"aten::cumsum", "aten::cumsum_"};  // of integers it does not

// One call of an operator: its arguments of the device are replaced by aliases for the CPU, its results are brought back.
struct Call {
  struct Argument {
    at::Tensor own, alias;
    bool is_written;
  };
  const c10::OperatorHandle& op;
  Stack* stack;
  const std::string name;
  const size_t begin;  // of the arguments on the stack
  int device = current_device();
  bool has_device = false, has_cpu = false;
  std::vector<Argument> arguments{};

  at::Tensor convert(const at::Tensor& t, bool is_written, bool may_be_on_cpu = false) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      // As in torch: a number may lie on the host, except among the counts of steps that a fused kernel reads itself.
      has_cpu |= t.device().is_cpu() && !may_be_on_cpu && (t.dim() > 0 || name.find("_fused_") != std::string::npos);
      return t;
    }
    if (t.dim() > 0) {
      TORCH_CHECK(!has_device || device == t.get_device(), name, ": tensors lie on cuda:", device, " and cuda:", t.get_device());
      has_device = true;
    }
    for (auto& each : arguments)
      if (each.own.is_same(t)) {
        each.is_written |= is_written;
        return each.alias;
      }
    device = t.get_device();
    arguments.push_back({t, cpu_alias(t, is_written), is_written});
    return arguments.back().alias;
  }

  // Boolean masks are counted on the host, and indices on the host are copied.
  std::optional<at::Tensor> convert_index(const std::optional<at::Tensor>& t) {
    if (!t || !t->defined()) return t;
    const bool is_mask = t->scalar_type() == at::kBool || t->scalar_type() == at::kByte;
    if (t->is_cuda() && is_mask) host_waits(current_stream(), name + " with a mask");
    if (t->device().is_cpu()) host_waits(current_stream(), name + " with indices on the CPU");
    return convert(*t, false, true);
  }

  void convert_arguments() {
    for (size_t i = 0; i < op.schema().arguments().size(); ++i) {
      auto& value = (*stack)[begin + i];
      const auto& declared = op.schema().arguments()[i];
      const bool is_written = declared.alias_info() && declared.alias_info()->isWrite();
      if (value.isTensor()) {
        value = convert(value.toTensor(), is_written);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) list.push_back(convert(t, is_written));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector()) list.push_back(convert_index(t));
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = at::Device(at::kCPU);
      } else if (declared.name() == "generator" && value.isNone()) {
        value = on_host(generator(device));
      } else if (value.isGenerator() && !arguments.empty()) {
        value = on_host(value.toGenerator());
      }
    }
    TORCH_CHECK(!(has_cpu && has_device), name, ": Expected all tensors to be on the same device, but found cuda:", device, " and cpu (emulated CUDA)");
  }

  void note_accesses() {
    Locked locked;
    const int s = current_stream(device);
    const auto time = emulated::begin(s);
    for (auto& each : arguments) touch(s, time, each.own, each.is_written, name);
  }

  // The CPU lacks the mixed precision of CUDA's softmax: 16 bits in and 32 out, or back.
  bool runs_as_softmax() {
    const bool is_log = name.find("log_softmax") != std::string::npos;
    if (name == "aten::_softmax.out" || name == "aten::_log_softmax.out") {
      if ((*stack)[begin + 2].toBool()) {
        (*stack)[begin] = (*stack)[begin].toTensor().to(at::kFloat);
        (*stack)[begin + 2] = false;
      }
    } else if (name == "aten::_softmax_backward_data.out" || name == "aten::_log_softmax_backward_data.out") {
      auto gradient = (*stack)[begin].toTensor(), output = (*stack)[begin + 1].toTensor(), into = (*stack)[begin + 4].toTensor();
      if (into.scalar_type() == gradient.scalar_type()) return false;
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      const auto dim = (*stack)[begin + 2].toInt();
      const auto dtype = gradient.scalar_type();
      into.copy_(is_log ? at::_log_softmax_backward_data(gradient, output, dim, dtype) : at::_softmax_backward_data(gradient, output, dim, dtype));
      stack->resize(begin);
      stack->push_back(into);
      return true;
    }
    return false;
  }

  // An out= argument may have another size now, and then other memory.
  void bring_back_sizes() {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    for (auto& each : arguments) {
      if (!each.is_written) continue;
      if (each.alias.sizes() == each.own.sizes() && each.alias.storage().data() == each.own.storage().data()) continue;
      at::native::resize_(each.own, each.alias.sizes());
      cpu_alias(each.own).copy_(each.alias);
    }
  }

  at::Tensor result(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto& each : arguments)
      if (each.alias.is_same(t)) return each.own;
    if (!t.device().is_cpu() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    for (auto& each : arguments)
      if (t.storage().data() && t.storage().data() == each.alias.storage().data()) return device_view(each.own, t);
    auto made = empty_on_device(t.sizes(), t.strides(), t.scalar_type(), device);
    {
      Locked locked;
      const int s = current_stream(device);
      touch(s, emulated::begin(s), made, true, name);
    }
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    if (t.numel()) cpu_alias(made).copy_(t);
    return made;
  }

  void bring_back_results() {
    const size_t count = op.schema().returns().size(), first = stack->size() - count;
    for (size_t i = 0; i < count; ++i) {
      auto& value = (*stack)[first + i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) list.push_back(result(t));
        value = list;
      }
    }
  }
};

static void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  Call call{op, stack, name, stack->size() - schema.arguments().size()};
  call.convert_arguments();
  if (WAITING.count(schema.name()) || WAITING.count(name)) host_waits(current_stream(call.device), name);
  if (name == "aten::repeat_interleave.Tensor" && stack->back().isNone()) host_waits(current_stream(call.device), name);
  const bool is_float = !call.arguments.empty() && call.arguments[0].own.is_floating_point();
  if (UNORDERED.count(schema.name()) || (is_float && UNORDERED_FLOATS.count(schema.name())))
    at::globalContext().alertNotDeterministic(name);
  call.note_accesses();
  const Launched launched(name);
  if (!call.runs_as_softmax()) op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.bring_back_sizes();
  call.bring_back_results();
}

// CUDA has one kernel for a whole list; without these, torch would take the list apart and call one for each tensor.
struct Foreach {
  std::vector<c10::RegistrationHandleRAII> handles;
  Foreach() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames())
      if (name.name.rfind("aten::_foreach_", 0) == 0)
        handles.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run>(),
                                                  std::nullopt, nullptr, "emulated CUDA"));
  }
};
static const Foreach foreach;

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

static int64_t choose_math(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace emulated

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &emulated::choose_math)
}
