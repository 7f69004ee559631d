// A CUDA device on which nothing happens, for a CPU build of torch: FakeTensors can say `cuda` and be differentiated.
// Autograd asks the device guard and the CUDA hooks; both answer, and no kernel is ever launched.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace {
const auto kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kCuda, 0); }
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// The name is the key under which torch looks for it.
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  bool isBuilt() const override { return true; }
};
}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}

namespace at::accelerator {
// Takes the place of torch's own: this library is loaded before it.
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return kCuda; }
}  // namespace at::accelerator

extern "C" void install() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard);
}
