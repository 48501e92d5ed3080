// Two CUDA devices over host memory: tensors say `cuda:0` or `cuda:1`, every operation on them runs on the CPU and is
// watched.
//
// A build of torch without CUDA has no kernels under its CUDA dispatch key. One boxed fallback there takes every
// operation: it looks at the arguments as CPU tensors over the same memory, calls the CPU kernel, and says where they are
// of what came out. What only a device does is added: copies that wait, pinned memory, a generator of its own, and graphs,
// which are the recorded operations, run again over the same memory. What is seen is told to Python (`Watch` below).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

using c10::Device, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::Storage, c10::StorageImpl;
using c10::OperatorHandle;
using at::Tensor;
using torch::jit::Stack;

constexpr int kNumDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_streams[kNumDevices] = {};

int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
Device cuda(int index) { return Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)); }

void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < kNumDevices, "CUDA error: invalid device ordinal ", index);
  current_device = static_cast<c10::DeviceIndex>(index);
}

// Within it another device is the current one, as of torch's own operations, which take that of their tensors.
struct OnDevice {
  explicit OnDevice(int index) : before(current_device) { set_device(index); }
  ~OnDevice() { current_device = before; }
  const c10::DeviceIndex before;
};

// ------------------------------------------------------------------------------------------------ what Python is told

// kind: "sync" (the host waits for the device), "wait" (for an event), "pageable" (a copy from or to memory that is not
// pinned, not said to block), "copy" (one that waits for nothing), "draw" (from the default generator), "race" (pinned
// memory changed while a copy still read it), "record_stream". detail: the operation. stream: whose work is meant. It is
// called on the thread that runs the operation; if it returns other than 0, the operation fails.
using Watch = int (*)(const char* kind, const char* detail, int64_t stream);
std::atomic<Watch> watch{nullptr};

void tell(const char* kind, const std::string& detail, int64_t stream = current_streams[current_device]) {
  Watch function = watch.load();
  if (function != nullptr && function(kind, detail.c_str(), stream) != 0)
    TORCH_CHECK(false, "called a synchronizing CUDA operation (", detail, ")");
}

// ------------------------------------------------------------------------------------------------------------- memory

constexpr unsigned char kPoison = 0xFF;  // NaN in every floating dtype, -1 in every integer one

// Of a device: bytes in use, most ever in use, and the most there may be (0: any number). A graph's memory is never used
// again for another piece of it, as torch's allocator would.
struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{0};
} memories[kNumDevices];

// Memory that device tensors share; it outlives the storages over it where a graph or a host alias still needs it.
struct Block {
  explicit Block(size_t bytes = 0, int device = 0) : size(bytes), memory(memories[device]) {
    const int64_t most = memory.limit.load(), now = memory.allocated += static_cast<int64_t>(bytes);
    if (most != 0 && now > most && bytes > 0) {
      memory.allocated -= static_cast<int64_t>(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (pretended): ", bytes, " bytes of ", most);
    }
    for (int64_t peak = memory.peak.load(); now > peak && !memory.peak.compare_exchange_weak(peak, now);) {
    }
  }
  ~Block() {
    memory.allocated -= static_cast<int64_t>(size);
    if (!owner && data != nullptr) std::free(data);
  }
  void* data = nullptr;
  const size_t size;
  Memory& memory;
  Storage owner;  // of what a CPU kernel allocated
};
using BlockRef = std::shared_ptr<Block>;

void release(void* context) { delete static_cast<BlockRef*>(context); }

struct Graph;
thread_local Graph* capturing = nullptr;
thread_local bool is_invalid = false;  // what is being captured: something illegal was tried
// As in torch 2.11: one flag of the default generator, which a capture that fails leaves set.
std::atomic<bool> generator_captures{false};
std::atomic<int> num_capturing{0};

c10::DataPtr data_of(BlockRef block, Device device) {
  void* data = block->data;
  return {data, new BlockRef(std::move(block)), &release, device};
}

BlockRef block_of(const StorageImpl& storage) {
  const auto& data = storage.data_ptr();
  TORCH_INTERNAL_ASSERT(data.get_deleter() == &release || data.get() == nullptr, "a cuda tensor of another maker");
  return data.get() == nullptr ? std::make_shared<Block>() : *static_cast<BlockRef*>(data.get_context());
}

void remember(const BlockRef& block);  // as memory of the graph that is being captured

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto block = std::make_shared<Block>(size, current_device);
    if (size > 0) {
      block->data = std::aligned_alloc(512, (size + 511) / 512 * 512);
      TORCH_CHECK_WITH(OutOfMemoryError, block->data != nullptr, "CUDA out of memory (pretended).");
      std::memset(block->data, kPoison, size);
    }
    remember(block);
    return data_of(std::move(block), cuda(current_device));
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // first byte -> size

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<char*>(data));
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(512, (size + 512) / 512 * 512);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<char*>(data)] = size;
    return {data, data, &unpin, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned_pointer(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(pointer) < after->first + std::max<size_t>(after->second, 1);
}

// ---------------------------------------------------------------------------------------------------------- generator

// A seed and an offset, as a GPU's. What is drawn from them as there is below; for the rest, the CPU's generator is
// seeded with both.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int index) : c10::GeneratorImpl(cuda(index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { own_seed = seed, own_offset = 0; }
  void set_offset(uint64_t offset) override { own_offset = offset; }
  uint64_t get_offset() const override { return own_offset; }
  uint64_t current_seed() const override { return own_seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return own_seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    std::memcpy(&own_seed, state.data(), 8);
    std::memcpy(&own_offset, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::AutoDispatchBelowADInplaceOrView below;
    auto state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &own_seed, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &own_offset, 8);
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(*this); }
  DeviceGenerator(const DeviceGenerator& other) : DeviceGenerator(other.device().index()) {
    own_seed = other.own_seed, own_offset = other.own_offset;
  }

  // A generator of the CPU's for one draw.
  at::Generator host() {
    own_offset += 4;
    return at::detail::createCPUGenerator(own_seed ^ (own_offset * 0x9E3779B97F4A7C15));
  }

  // `distribution_elementwise_grid_stride_kernel` of ATen/native/cuda/DistributionTemplates.h, thread by thread.
  void exponential(float* numbers, int64_t count) {
    if (count == 0) return;
    constexpr int64_t kBlock = 256, kBlocks = kProcessors * (kThreads / kBlock), kUnroll = 4;
    const int64_t threads = std::min((count + kBlock - 1) / kBlock, kBlocks) * kBlock;
    for (int64_t thread = 0; thread < threads; ++thread) {
      at::Philox4_32 engine(own_seed, thread, own_offset / 4);
      for (int64_t first = thread; first < count; first += threads * kUnroll) {
        for (int64_t unrolled = 0; unrolled < kUnroll; ++unrolled) {
          const uint32_t word = engine();
          if (first + threads * unrolled >= count) continue;
          const float uniform = static_cast<float>(word) * 0x1p-32f + 0x1p-33f;
          numbers[first + threads * unrolled] =
              uniform >= 1 - 0x1p-24f ? 0x1p-24f : -(std::log2(uniform) * 0.69314718f);
        }
      }
    }
    own_offset += ((count - 1) / (threads * kUnroll) + 1) * 4;
  }

  static constexpr int64_t kProcessors = 8, kThreads = 2048;  // as the device's properties say
  uint64_t own_seed = c10::detail::getNonDeterministicRandom(false), own_offset = 0;
};

at::Generator new_generator(int index) { return at::make_generator<DeviceGenerator>(index); }

const at::Generator& default_generator(int index) {
  static at::Generator own[kNumDevices] = {new_generator(0), new_generator(1)};
  return own[index];
}

// ----------------------------------------------------------------------------------------------------- torch's own hooks

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  int getNumGPUs() const override { return kNumDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = ::current_device;
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return cuda(::current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? ::current_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? ::current_device : index);
  }
};

// ------------------------------------------------------------------------------------------- copies that are on their way

// A copy to the host arrives when the host has waited for it; until then its destination holds poison. Of a copy from
// pinned memory, that memory must be as it was until then. Waiting for a moment of one stream is taken as waiting for
// what all streams of its device began before: it finds less, and what it finds is true.
struct OnItsWay {
  int64_t number;
  int device;
  std::string name;
  Tensor content;
  Tensor destination;                                           // of one to the host
  std::optional<c10::weak_intrusive_ptr<StorageImpl>> source;   // of one from it
  const char* first = nullptr;
};
std::mutex way_lock;
std::vector<OnItsWay> on_their_way;
std::atomic<int64_t> moment{0};

// Of a device, or (-1) of all.
void arrive(int64_t until, int device) {
  std::vector<OnItsWay> arrived;
  {
    std::lock_guard<std::mutex> guard(way_lock);
    auto rest = std::stable_partition(on_their_way.begin(), on_their_way.end(), [&](const auto& one) {
      return one.number <= until && (device == -1 || one.device == device);
    });
    std::move(on_their_way.begin(), rest, std::back_inserter(arrived));
    on_their_way.erase(on_their_way.begin(), rest);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& one : arrived) {
    if (one.destination.defined()) {
      one.destination.copy_(one.content);
    } else if (auto alive = one.source->lock()) {
      if (std::memcmp(one.first, one.content.const_data_ptr(), one.content.nbytes()) != 0)
        tell("race", "pinned memory was written while it was copied, " + one.name);
    }
  }
}

struct Event {
  int64_t stream, number;
  int device;
  std::chrono::steady_clock::time_point time;
};

std::atomic<int64_t> num_streams{1};

void sync(const std::string& what, int64_t stream = current_streams[current_device], int device = current_device);
void refuse_in_capture(const std::string& what);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id, int device) { return c10::Stream(c10::Stream::UNSAFE, cuda(device), id); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const auto before = current_device;
    set_device(index_of(device));
    return cuda(before);
  }
  Device getDevice() const override { return cuda(current_device); }
  void setDevice(Device device) const override { set_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = static_cast<c10::DeviceIndex>(index_of(device)); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Stream getStream(Device device) const override { return stream(current_streams[index_of(device)], index_of(device)); }
  c10::Stream getDefaultStream(Device device) const override { return stream(0, index_of(device)); }
  c10::Stream getNewStream(Device device, int) const override { return stream(num_streams++, index_of(device)); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const int device = other.device_index();
    return stream(std::exchange(current_streams[device], other.id()), device);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& other) const override {
    sync("stream.synchronize()", other.id(), other.device_index());
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { sync("torch.cuda.synchronize()", -1, index); }
  void record(void** event, const c10::Stream& other, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {other.id(), moment.load(), other.device_index(), std::chrono::steady_clock::now()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    arrive(static_cast<Event*>(event)->number, static_cast<Event*>(event)->device);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    const auto& own = *static_cast<Event*>(event);
    tell("wait", "event.synchronize()", own.stream);
    refuse_in_capture("event.synchronize()");
    arrive(own.number, own.device);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const auto time = static_cast<Event*>(last)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& other) const override {
    tell("record_stream", "", other.id());
  }
};

// ------------------------------------------------------------------------------------------------------------- graphs

struct Recorded {
  OperatorHandle op;
  Stack arguments;  // host tensors
  std::vector<Tensor> results;
};

struct Graph {
  std::vector<Recorded> operations;
  std::set<BlockRef> memory;  // allocated while it was captured
  std::vector<std::pair<c10::weak_intrusive_ptr<StorageImpl>, std::string>> inputs;  // allocated before: must stay
  std::set<const StorageImpl*> known;
};

std::mutex graphs_lock;
std::unordered_map<int64_t, std::shared_ptr<Graph>> graphs;
int64_t next_graph = 1;

void remember(const BlockRef& block) {
  if (capturing != nullptr) capturing->memory.insert(block);
}

// Called for each device tensor that something recorded reads or writes.
void note_input(const Tensor& tensor, const std::string& reader) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (capturing == nullptr || storage->data_ptr().get() == nullptr) return;
  if (capturing->memory.count(block_of(*storage)) || !capturing->known.insert(storage).second) return;
  auto strong = c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage);
  capturing->inputs.emplace_back(c10::weak_intrusive_ptr<StorageImpl>(strong), reader);
}

void refuse_in_capture(const std::string& what) {
  if (capturing == nullptr) return;
  is_invalid = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing: ", what);
}

// What holds the host until the device is there; stream -1: all of it.
void sync(const std::string& what, int64_t stream, int device) {
  tell("sync", what, stream);
  refuse_in_capture(what);
  TORCH_CHECK(stream != -1 || num_capturing.load() == 0, "CUDA error: operation not permitted when stream is capturing: ",
              what, " beside another thread's capture");
  arrive(moment.load(), device);
}

// ------------------------------------------------------------------------------------------------------ device <-> host

Storage host_storage(const Storage& storage) {
  auto block = block_of(*storage.unsafeGetStorageImpl());
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), data_of(block, Device(DeviceType::CPU)),
                 c10::GetAllocator(DeviceType::CPU), /*resizable=*/true);
}

Tensor host_alias(const Tensor& tensor) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(host_storage(tensor.storage()), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

Storage device_storage(const Storage& own, int device) {
  auto block = std::make_shared<Block>(own.nbytes(), device);
  block->data = own.mutable_data();
  block->owner = own;
  remember(block);
  return Storage(Storage::use_byte_size_t(), own.nbytes(), data_of(block, cuda(device)), &device_allocator, true);
}

// With the keys of what it is a view of, if it is one: in inference mode, too, a view of an ordinary tensor is ordinary.
Tensor device_tensor(const Tensor& host, Storage storage, const Tensor* base = nullptr) {
  auto made = base == nullptr
      ? at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), host.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), base->key_set(), host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

template <class Function>
void each_tensor(IValue& value, Function&& function) {
  if (value.isTensor()) {
    Tensor tensor = value.toTensor();
    if (tensor.defined() && function(tensor)) value = tensor;
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    c10::List<Tensor> changed;
    bool any = false;
    for (const auto index : c10::irange(list.size())) {
      Tensor tensor = list.get(index);
      any |= tensor.defined() && function(tensor);
      changed.push_back(tensor);
    }
    if (any) value = changed;
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList();
    c10::List<std::optional<Tensor>> changed;
    bool any = false;
    for (const auto index : c10::irange(list.size())) {
      std::optional<Tensor> tensor = list.get(index);
      if (tensor.has_value() && tensor->defined()) {
        Tensor own = *tensor;
        any |= function(own);
        tensor = own;
      }
      changed.push_back(tensor);
    }
    if (any) value = changed;
  }
}

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  for (const char* one : names)
    if (name == one) return true;
  return false;
}

// Operations whose result's size, or whose result, the host must know: they read it from the device.
bool reads_back(const std::string& name) {
  return is_one_of(name, {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                          "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero",
                          "aten::repeat_interleave", "aten::nonzero_static"});
}

bool takes_host_tensors(const std::string& name) {
  return is_one_of(name, {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::index", "aten::index_put_", "aten::index_put",
                          "aten::_index_put_impl_"});
}

// Looks at a copy. Returns whether it is done, as far as it is.
bool copy(const Tensor& destination, const Tensor& source, bool non_blocking, const std::string& shape) {
  const bool to_device = destination.is_cuda(), from_device = source.is_cuda();
  if (to_device && from_device) return false;
  const Tensor& host = to_device ? source : destination;
  if (host.numel() == 0) return false;
  const std::string name = std::string(to_device ? "host to device" : "device to host") + shape;
  if (!non_blocking) {
    sync("copy, " + name);
    return false;
  }
  if (!is_pinned_pointer(host.const_data_ptr())) {
    tell("pageable", name);
    refuse_in_capture("a copy of pageable memory, " + name);
    return false;
  }
  tell("copy", name);
  if (capturing != nullptr) return false;
  at::AutoDispatchBelowADInplaceOrView below;
  if (to_device) {
    if (!source.is_contiguous()) return false;
    OnItsWay one{++moment, destination.device().index(), name, source.clone(), {}, {}, static_cast<const char*>(source.const_data_ptr())};
    one.source = c10::weak_intrusive_ptr<StorageImpl>(
        c10::intrusive_ptr<StorageImpl>::reclaim_copy(source.storage().unsafeGetStorageImpl()));
    std::lock_guard<std::mutex> guard(way_lock);
    on_their_way.push_back(std::move(one));
    return false;
  }
  OnItsWay one{++moment, source.device().index(), name, at::empty_like(destination), destination};
  one.content.copy_(host_alias(source));
  std::memset(destination.mutable_data_ptr(), kPoison, destination.is_contiguous() ? destination.nbytes() : 0);
  std::lock_guard<std::mutex> guard(way_lock);
  on_their_way.push_back(std::move(one));
  return true;
}

std::string shape_of(const Tensor& tensor) {
  std::string text = " [";
  for (const auto size : tensor.sizes()) text += (text.size() > 2 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Draws what is drawn the same way here as on a GPU (`multinomial`: ATen/native/Distributions.cpp); returns whether.
bool draw_as_a_gpu(const std::string& name, Stack* stack, size_t count, DeviceGenerator& generator) {
  const auto arguments = stack->end() - count;
  if (!is_one_of(name, {"aten::exponential_", "aten::multinomial"})) return false;
  Tensor device = arguments[0].toTensor();
  Tensor numbers = host_alias(device);
  if (numbers.scalar_type() != at::kFloat || !numbers.is_contiguous()) return false;
  at::AutoDispatchBelowADInplaceOrView below;
  if (name == "aten::exponential_") {
    if (arguments[1].toDouble() != 1) return false;
    note_input(device, name);
    generator.exponential(numbers.mutable_data_ptr<float>(), numbers.numel());
    torch::jit::drop(*stack, count);
    stack->push_back(device);
    return true;
  }
  note_input(device, name);
  const int64_t num_samples = arguments[1].toInt();
  if ((num_samples > 1 && arguments[2].toBool()) || !at::isfinite(numbers).all().item<bool>() ||
      at::lt(numbers, 0).any().item<bool>())
    return false;
  Tensor noise = at::empty_like(numbers);
  generator.exponential(noise.mutable_data_ptr<float>(), noise.numel());
  noise = numbers / noise;
  const Tensor found = num_samples == 1 ? at::argmax(noise, -1, true) : std::get<1>(at::topk(noise, num_samples, -1));
  torch::jit::drop(*stack, count);
  stack->push_back(device_tensor(found, device_storage(found.storage(), current_device)));
  return true;
}

void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size();

  // What the arguments say.
  bool any_device = false, any_host = false;
  int where = -1, elsewhere = -1;  // the first tensor's device, and another one's
  struct Pair {
    Tensor device, host;
  };
  std::vector<Pair> pairs;
  std::vector<std::pair<Storage, Storage>> storages;  // on the device, on the host
  for (const auto index : c10::irange(count)) {
    IValue& value = (*stack)[stack->size() - count + index];
    each_tensor(value, [&](Tensor& tensor) {
      if (!tensor.is_cuda()) {
        any_host |= tensor.dim() > 0;
        return false;
      }
      any_device = true;
      const int device = tensor.device().index();
      if (where == -1) where = device;
      if (device != where) elsewhere = device;
      return false;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) any_device = true;
  }
  TORCH_CHECK(elsewhere == -1 || name == "aten::copy_", "Expected all tensors to be on the same device, but found at least "
              "two devices, cuda:", where, " and cuda:", elsewhere, "! (when checking arguments of ", name, ")");
  for (const auto index : c10::irange(count)) {
    const IValue& value = (*stack)[stack->size() - count + index];
    if (value.isDevice() && value.toDevice().is_cuda()) where = index_of(value.toDevice());
  }
  OnDevice on_device(where == -1 ? current_device : where);
  TORCH_CHECK(!(any_device && any_host) || takes_host_tensors(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (when "
              "checking arguments of ", name, ")");

  bool is_draw = false;
  for (const auto index : c10::irange(count)) is_draw |= schema.arguments()[index].name() == "generator";
  if (reads_back(name)) sync(name);
  // `index` itself asks for the places of a mask's ones; here the CPU's kernel would. One value for all fills the mask.
  if (is_one_of(name, {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})) {
    const auto last = stack->end() - count;
    const bool fills = last[2].toTensor().numel() == 1;
    IValue indices = last[1];
    each_tensor(indices, [&](Tensor& index) {
      const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      if (is_mask ? !fills : !index.is_cuda()) sync(name);
      return false;
    });
  }
  if (name == "aten::copy_") {
    const auto& all = *stack;
    const Tensor to = all[all.size() - count].toTensor(), from = all[all.size() - count + 1].toTensor();
    if (copy(to, from, all[all.size() - count + 2].toBool(), shape_of(from))) {
      torch::jit::drop(*stack, count);
      stack->push_back(to);
      return;
    }
  }
  if (is_draw) {
    const auto at = [&] {
      for (const auto index : c10::irange(count))
        if (schema.arguments()[index].name() == "generator") return index;
      return size_t(0);
    }();
    IValue& value = (*stack)[stack->size() - count + at];
    const auto& own_default = default_generator(current_device);
    if (value.isNone() || (value.isGenerator() && value.toGenerator() == own_default)) {
      tell("draw", name);
      refuse_in_capture("a draw from the default generator, " + name);
      TORCH_CHECK(!generator_captures.load(), "Offset increment outside graph capture encountered unexpectedly: ", name,
                  " draws from the default generator while a graph is captured");
      value = own_default;
    }
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      if (auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())) {
        refuse_in_capture("a draw from a generator that the graph does not know, " + name);
        TORCH_CHECK(own->device().index() == current_device, "Expected a 'cuda:", int(current_device),
                    "' generator device but found '", own->device().str(), "'");
        if (draw_as_a_gpu(name, stack, count, *own)) return;
        value = own->host();
      } else {
        TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu'");
      }
    }
  }

  // A GPU multiplies groups of rows in one kernel in bfloat16 only; for other dtypes torch reads their sizes first.
  if (name == "aten::_grouped_mm" && (*stack)[stack->size() - count].toTensor().scalar_type() != at::kBFloat16)
    sync(name + ", whose offsets are read on the host");
  // What a GPU counts and the CPU does not.
  if (name == "aten::histc") {
    IValue& counted = (*stack)[stack->size() - count];
    if (!at::isFloatingType(counted.toTensor().scalar_type())) counted = counted.toTensor().to(at::kFloat);
  }

  // The same arguments on the host.
  for (const auto index : c10::irange(count)) {
    IValue& value = (*stack)[stack->size() - count + index];
    each_tensor(value, [&](Tensor& tensor) {
      if (!tensor.is_cuda()) return false;
      note_input(tensor, name);
      for (const auto& pair : pairs) {
        if (pair.device.is_same(tensor)) {
          tensor = pair.host;
          return true;
        }
      }
      pairs.push_back({tensor, host_alias(tensor)});
      tensor = pairs.back().host;
      return true;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) value = Device(DeviceType::CPU);
    if (value.isStorage() && value.toStorage().device().is_cuda()) {
      storages.emplace_back(value.toStorage(), host_storage(value.toStorage()));
      value = storages.back().second;
    }
    if (schema.arguments()[index].name() == "pin_memory" && value.isBool()) value = false;
  }
  Stack recorded;
  if (capturing != nullptr) recorded.assign(stack->end() - count, stack->end());

  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }

  // What changed shape or memory (`out=`, `resize_`).
  for (auto& pair : pairs) {
    auto* device = pair.device.unsafeGetTensorImpl();
    const auto& host = pair.host;
    if (host.storage().data() != pair.device.storage().data()) {
      auto given = std::find_if(storages.begin(), storages.end(), [&](const auto& one) {
        return one.second.unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl();
      });
      device->set_storage_keep_dtype(given != storages.end() ? given->first : device_storage(host.storage(), current_device));
    }
    if (host.sizes() != pair.device.sizes() || host.strides() != pair.device.strides() ||
        host.storage_offset() != pair.device.storage_offset())
      device->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  // What came out.
  const size_t num_results = schema.returns().size();
  std::vector<Tensor> results;
  for (const auto index : c10::irange(num_results)) {
    each_tensor((*stack)[stack->size() - num_results + index], [&](Tensor& tensor) {
      if (capturing != nullptr) results.push_back(tensor);
      for (const auto& pair : pairs) {
        if (pair.host.is_same(tensor)) {
          tensor = pair.device;
          return true;
        }
      }
      if (!any_device || is_one_of(name, {"aten::copy_"})) return false;  // a copy to the host returns its argument
      for (const auto& pair : pairs) {
        if (tensor.storage().unsafeGetStorageImpl() == pair.host.storage().unsafeGetStorageImpl()) {
          tensor = device_tensor(tensor, pair.device.storage(), &pair.device);
          return true;
        }
      }
      tensor = device_tensor(tensor, device_storage(tensor.storage(), current_device));
      return true;
    });
  }
  if (capturing != nullptr) capturing->operations.push_back({op, std::move(recorded), std::move(results)});
}

// ------------------------------------------------------------------------------------------------- called from Python

std::shared_ptr<Graph> graph_of(int64_t number) {
  std::lock_guard<std::mutex> guard(graphs_lock);
  return graphs.at(number);
}

int64_t capture_begin() {
  TORCH_CHECK(capturing == nullptr, "CUDA error: this thread captures already");
  std::lock_guard<std::mutex> guard(graphs_lock);
  graphs[next_graph] = std::make_shared<Graph>();
  capturing = graphs[next_graph].get();
  is_invalid = false;
  generator_captures = true;
  ++num_capturing;
  return next_graph++;
}

// Raises for one in which something illegal was tried.
void capture_end() {
  TORCH_CHECK(capturing != nullptr, "CUDA error: this thread captures nothing");
  capturing = nullptr;
  --num_capturing;
  TORCH_CHECK(!is_invalid, "CUDA error: operation failed due to a previous error during capture");
  generator_captures = false;
}

bool capture_fails() {
  if (capturing == nullptr) return false;
  is_invalid = true;
  return true;
}

bool is_capturing() { return capturing != nullptr; }
int64_t graph_size(int64_t number) { return static_cast<int64_t>(graph_of(number)->operations.size()); }

// Names of those of its operations that compute something: not views, nor memory that nothing is written to.
std::vector<std::string> graph_operations(int64_t number) {
  std::vector<std::string> names;
  for (const auto& recorded : graph_of(number)->operations) {
    const auto& schema = recorded.op.schema();
    const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
    const bool is_view = (alias != nullptr && !alias->isWrite()) || is_one_of(schema.name(), {"aten::_unsafe_view"});
    if (!is_view && schema.name().find("empty") == std::string::npos) names.push_back(schema.name());
  }
  return names;
}

void graph_drop(int64_t number) {
  std::lock_guard<std::mutex> guard(graphs_lock);
  graphs.erase(number);
}

// Everything that graphs over one pool computed before is gone: another one may have used the memory.
void graph_poison(int64_t number) {
  for (const auto& block : graph_of(number)->memory)
    if (block->data != nullptr) std::memset(block->data, kPoison, block->size);
}

void graph_check(int64_t number) {
  for (const auto& [storage, reader] : graph_of(number)->inputs)
    TORCH_CHECK(!storage.expired(), "a graph reads memory that was freed after it was captured (", reader, ")");
}

void graph_replay(int64_t number, int64_t first, int64_t last) {
  auto graph = graph_of(number);
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto index : c10::irange(first, last)) {
    auto& recorded = graph->operations[index];
    Stack stack = recorded.arguments;
    recorded.op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    size_t place = 0;
    for (auto& value : stack) {
      each_tensor(value, [&](Tensor& tensor) {
        const Tensor& home = recorded.results[place++];
        if (home.const_data_ptr() != tensor.const_data_ptr()) home.copy_(tensor);
        return false;
      });
    }
  }
}

Tensor host(const Tensor& tensor) {
  note_input(tensor, "a Triton kernel");
  return host_alias(tensor);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

static const bool is_registered = [] {
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  // `import torch` has made its own hooks, which say that there is no device and can't be replaced any more. Neither
  // object has members: with our table of virtual functions it is ours.
  static const Hooks hooks;
  auto* existing = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(void*));
  std::memcpy(static_cast<void*>(existing), static_cast<const void*>(&hooks), sizeof(void*));
  return true;
}();

TORCH_LIBRARY(pretend_cuda, library) {
  library.def("watch(int function) -> ()", [](int64_t function) { watch.store(reinterpret_cast<Watch>(function)); });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
  library.def("current_device() -> int", [] { return int64_t(current_device); });
  library.def("set_device(int device) -> ()", [](int64_t device) { set_device(static_cast<int>(device)); });
  library.def("capture_begin() -> int", &capture_begin);
  library.def("capture_end() -> ()", &capture_end);
  library.def("is_capturing() -> bool", &is_capturing);
  library.def("capture_fails() -> bool", &capture_fails);
  library.def("graph_size(int graph) -> int", &graph_size);
  library.def("graph_operations(int graph) -> str[]", &graph_operations);
  library.def("graph_replay(int graph, int first, int last) -> ()", &graph_replay);
  library.def("graph_poison(int graph) -> ()", &graph_poison);
  library.def("graph_check(int graph) -> ()", &graph_check);
  library.def("graph_drop(int graph) -> ()", &graph_drop);
  library.def("host(Tensor tensor) -> Tensor");
  library.def("allocated(int device) -> int", [](int64_t device) { return memories[device].allocated.load(); });
  library.def("peak_allocated(int device) -> int", [](int64_t device) { return memories[device].peak.load(); });
  library.def("reset_peak(int device) -> ()", [](int64_t device) { memories[device].peak = memories[device].allocated.load(); });
  library.def("set_limit(int bytes, int device) -> ()", [](int64_t bytes, int64_t device) { memories[device].limit = bytes; });
}
TORCH_LIBRARY_IMPL(pretend_cuda, CUDA, library) { library.impl("host", &host); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on_device(device.has_value() ? index_of(*device) : current_device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on_device(device.has_value() ? index_of(*device) : current_device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           DispatchKeySet(DispatchKey::CUDA),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// Composite operations that look their kernel up by the device's type, or of which a GPU has its own: taken whole.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", [](Tensor&, c10::Stream stream) { tell("record_stream", "", stream.id()); });
  for (const char* name : {"copy_", "scaled_dot_product_attention", "_grouped_mm", "convolution"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
