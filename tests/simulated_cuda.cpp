// The part of the pretend device that needs C++: torch's autograd asks which devices there are.
// Streams of the pretend device do nothing, as everything is computed at once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

struct Hooks : at::CUDAHooksInterface {
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
};

struct Guard : c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
  at::Device getDevice() const override { return at::Device(at::kCUDA, 0); }
  c10::Stream getStream(at::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
};

// A CPU build of torch has one object with the hooks of no device. These take its place in memory,
// so that it does not matter who has asked for it before.
static auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

static c10::impl::DeviceGuardImplRegistrar registrar(at::kCUDA, new Guard);
