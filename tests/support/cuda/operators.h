// Operators on tensors of the emulated device: factories, copies and views, and the fallback that runs CPU kernels on host aliases.
#pragma once
#include "runtime.h"

namespace {
at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(checked_device(device));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice guard(checked_device(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// Returns a CPU tensor on the same memory.
at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != CUDA) return tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device{c10::kCPU}), c10::GetAllocator(c10::kCPU), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool to_device = self.device().type() == CUDA;
  if (to_device != (source.device().type() == CUDA)) {
    const auto& host = to_device ? source : self;
    bool pinned = host.is_contiguous() && is_pinned(host.const_data_ptr());
    if (!to_device && !(non_blocking && pinned)) wait("copy to host");
    if (to_device && !pinned) wait("copy to device from unpinned memory");
    if (to_device && pinned && !non_blocking) wait("copy to device");
  }
  auto alias = host_alias(self);
  alias.copy_(host_alias(source));
  return self;
}

at::Tensor _copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto result = target;
  copy_(result, source, non_blocking);
  return result;
}

at::Tensor _copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  host_alias(target).copy_(host_alias(source));
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait("item");
  return at::_local_scalar_dense(host_alias(tensor));
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor _reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void resize_storage(c10::StorageImpl* storage, size_t size) {
  OnDevice guard(storage->device());
  c10::DataPtr memory = device_memory.allocate(size);
  if (storage->data() && size) std::memcpy(memory.get(), storage->data(), std::min(storage->nbytes(), size));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

at::Tensor& set_(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.itemsize();
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {count}, {});
}

// Operators that accept host tensors together with device tensors, as on CUDA.
const std::unordered_set<std::string> MIXES_DEVICES = {"aten::index.Tensor",     "aten::index_put_",      "aten::_index_put_impl_",
                                                       "aten::index_put",        "aten::index.Tensor_out", "aten::_to_copy",
                                                       "aten::set_.source_Tensor", "aten::_foreach_copy_"};
// Operators for which the host waits, because the result has a size or value that it needs.
const std::unordered_set<std::string> WAITS = {"aten::nonzero",    "aten::nonzero.out",         "aten::masked_select",
                                               "aten::_unique2",   "aten::masked_select.out",   "aten::unique_dim",
                                               "aten::equal",      "aten::unique_consecutive",  "aten::bincount"};

// What an operator's arguments say about devices, indices and masks.
struct Arguments {
  std::optional<c10::Device> device;  // of the first device tensor
  std::string other;                  // another device among the arguments
  bool has_mask = false, has_host_index = false;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    auto found = tensor.device();
    if (found.type() != CUDA) {
      if (tensor.dim() > 0) other = found.str();  // scalars of the host are arguments of the kernel
      return;
    }
    if (device && *device != found) other = found.str();
    if (!device) device = found;
  }
  void add_index(const at::Tensor& tensor) {
    add(tensor);
    has_mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    has_host_index |= tensor.device().type() != CUDA;
  }
};

void check_generator(const at::Generator& generator) {
  if (!generator.defined() || generator == at::detail::getDefaultCPUGenerator()) return;  // the default of both devices
  TORCH_CHECK(device_generators.count(generator.unsafeGetGeneratorImpl()),
              "Expected a 'cuda' device type for generator but found '", generator.device().str(), "'");
}

Arguments read_arguments(const std::string& name, torch::jit::Stack* stack, size_t count) {
  Arguments found;
  for (const auto& value : torch::jit::last(*stack, count)) {
    if (value.isGenerator()) check_generator(value.toGenerator());
    else if (value.isTensor()) found.add(value.toTensor());
    else if (value.isTensorList()) for (const auto& tensor : value.toTensorVector()) found.add(tensor);
    else if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector()) if (tensor && tensor->defined()) found.add_index(*tensor);
  }
  TORCH_CHECK(found.other.empty() || MIXES_DEVICES.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              found.device ? found.device->str() : "cuda", " and ", found.other, "! (when calling ", name, ")");
  return found;
}

void report_waits(const std::string& name, const Arguments& found, torch::jit::Stack* stack, size_t count) {
  if (WAITS.count(name)) wait(name.c_str() + 6);
  if (name == "aten::repeat_interleave.Tensor" && torch::jit::peek(*stack, 1, count).isNone()) wait("repeat_interleave");
  if (name != "aten::_index_put_impl_") return;  // aten::index moves its indices with copies, and masks with nonzero
  if (found.has_host_index) wait("index on the host");
  bool is_fill = torch::jit::peek(*stack, 2, count).toTensor().numel() == 1;  // becomes a masked_fill
  if (found.has_mask && !is_fill) wait("index by a mask");
}

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // device tensor and its host alias

void replace_by_host_aliases(torch::jit::Stack* stack, size_t count, Pairs& pairs) {
  auto lower = [&](const at::Tensor& tensor) {
    auto alias = host_alias(tensor);
    if (tensor.defined() && tensor.device().type() == CUDA) pairs.emplace_back(tensor, alias);
    return alias;
  };
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = c10::IValue(lower(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(lower(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(lower(*tensor)) : tensor);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == CUDA) {
      value = c10::IValue(c10::Device{c10::kCPU});
    }
  }
}

// Returns the device tensor of a result: an argument, a view of one, or a copy in new device memory.
at::Tensor raise_result(const at::Tensor& result, const Pairs& pairs, c10::Device device) {
  if (!result.defined()) return result;
  for (auto& [ours, alias] : pairs) if (result.is_same(alias)) return ours;
  for (auto& [ours, alias] : pairs) {
    if (!result.storage().data() || result.storage().data() != ours.storage().data()) continue;
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(),
                                                         result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return made;
  }
  OnDevice guard(device);
  at::Tensor made = at::detail::empty_strided_generic(result.sizes(), result.strides(), &device_memory,
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA), result.scalar_type());
  host_alias(made).copy_(result);
  return made;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), num_results = schema.returns().size();
  std::string name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  auto found = read_arguments(name, stack, count);
  report_waits(name, found, stack, count);
  Pairs pairs;
  replace_by_host_aliases(stack, count, pairs);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [ours, alias] : pairs) {  // an operator with an `out` argument may have resized it
    if (ours.sizes() == alias.sizes() && (!alias.numel() || alias.storage().data() == ours.storage().data())) continue;
    ours.resize_(alias.sizes());
    host_alias(ours).copy_(alias);
  }
  auto device = found.device.value_or(c10::Device{CUDA, current});
  for (size_t i = stack->size() - num_results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = c10::IValue(raise_result(value.toTensor(), pairs, device));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(raise_result(tensor, pairs, device));
      value = list;
    }
  }
}
}  // namespace
