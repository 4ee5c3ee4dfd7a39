// A simulated accelerator for PyTorch's PrivateUse1 slot.
//
// Work is done at once, on host memory; what is simulated is its order. Each stream has a vector clock, an event is a
// copy of its stream's clock, and waiting merges one clock into another. An operation that touches memory which another
// stream uses, with nothing that orders the two, is written down as a violation, whatever the timing of this run was.

#define AT_PER_OPERATOR_HEADERS  // or each operation of PyTorch is declared, and compiling takes twice as long

#include <pthread.h>

#include <array>
#include <bitset>
#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr int device_count = 2;
constexpr int streams_per_device = 33;  // number 0 is the default stream, the others are handed out in turn
constexpr int stream_count = device_count * streams_per_device;
constexpr unsigned char poison = 0xCD;  // in memory whose contents have not arrived
constexpr size_t most_violations = 1000;

// ---------------------------------------------------------------------------------------------------------------------
// Clocks, memory and what used it

using Clock = std::array<uint64_t, stream_count>;

void merge(Clock& clock, const Clock& other) {
  for (int stream = 0; stream < stream_count; ++stream) clock[stream] = std::max(clock[stream], other[stream]);
}

bool covers(const Clock& clock, const Clock& other) {
  for (int stream = 0; stream < stream_count; ++stream)
    if (clock[stream] < other[stream]) return false;
  return true;
}

std::string describe(int stream) {
  std::ostringstream text;
  text << "stream " << stream % streams_per_device << " of sim:" << stream / streams_per_device;
  return text.str();
}

struct Memory;

// A range of bytes that an operation reads or writes. Ranges, and not whole allocations, so that streams may fill
// disjoint parts of one buffer.
struct Access {
  Memory* memory = nullptr;
  size_t begin = 0;
  size_t end = 0;
  bool writes = false;

  bool overlaps(const Access& other) const {
    return memory && memory == other.memory && begin < other.end && other.begin < end;
  }
  bool covers(const Access& other) const {
    return memory == other.memory && begin <= other.begin && other.end <= end;
  }
};

struct Use {
  Access access;
  int stream;
  uint64_t time;
  std::string operation;  // empty for the allocation itself

  bool covered_by(const Clock& clock) const { return time <= clock[stream]; }
};

struct Memory {
  char* data;
  size_t size;
  int device = -1;  // negative for pinned host memory
  int stream = 0;   // the stream that it was allocated on
  std::vector<Use> uses;
  std::bitset<stream_count> recorded;
};

// A copy between pinned host memory and a device that the host has not waited for yet.
struct Deferred {
  int stream;
  uint64_t time;
  c10::Storage keep;  // pinned memory outlives the copies that use it
  Access device;      // what the copy will write; none for a copy to the host, whose bytes are in `snapshot`
  Access host;
  std::vector<char> snapshot;
  std::vector<int64_t> sizes, target_strides, source_strides;
  size_t item_size;
  char* target;
  const char* source;
};

struct Stream {
  Clock clock{};
  int late = 0;  // how many queries still answer "not yet"
};

struct Event {
  Clock clock{};
  int late = 0;
  std::chrono::steady_clock::time_point recorded;
};

struct State {
  std::mutex mutex;
  std::array<Stream, stream_count> streams;
  Clock host{};  // what the host knows to be over
  std::map<const char*, Memory*> memories;
  std::list<Deferred> deferred;
  std::vector<std::string> violations;
  std::array<int, device_count> handed_out{};
  int64_t device_synchronizations = 0;
  int64_t stream_synchronizations = 0;
  int lateness = 2;
};

State& state() {
  static State* instance = new State;  // never destroyed: memory is freed until the very end of the process
  return *instance;
}

thread_local int current_device = 0;
thread_local std::array<int, device_count> current_streams{};

int current_stream(int device) { return device * streams_per_device + current_streams[device]; }

int number_of(const c10::Stream& stream) {
  return stream.device_index() * streams_per_device + static_cast<int>(stream.id());
}

void copy_elements(char* target, const int64_t* target_strides, const char* source, const int64_t* source_strides,
                   const int64_t* sizes, size_t dimensions, size_t item_size) {
  if (dimensions == 0) {
    std::memcpy(target, source, item_size);
  } else if (dimensions == 1 && *target_strides == 1 && *source_strides == 1) {
    std::memcpy(target, source, *sizes * item_size);
  } else {
    for (int64_t index = 0; index < *sizes; ++index)
      copy_elements(target + index * *target_strides * item_size, target_strides + 1,
                    source + index * *source_strides * item_size, source_strides + 1, sizes + 1, dimensions - 1,
                    item_size);
  }
}

// All that is done under the mutex. Nothing in it may wait for Python's lock: what it no longer needs of the host's
// tensors is dropped after the mutex is released.
class Session {
 public:
  // Puts one operation on a stream: finds what is not ordered before it, and returns its time.
  uint64_t enqueue(int stream, const std::string& operation, const std::vector<Access>& accesses) {
    Clock& clock = state().streams[stream].clock;
    merge(clock, state().host);
    const uint64_t time = ++clock[stream];
    state().streams[stream].late = state().lateness;
    for (const Access& access : accesses) {
      auto is_its_write = [&](const Access& other) { return other.writes && other.covers(access); };
      if (!access.memory || (!access.writes && std::any_of(accesses.begin(), accesses.end(), is_its_write))) continue;
      deliver([&](const Deferred& copy) { return access.overlaps(copy.device) || access.overlaps(copy.host); });
      for (const Use& use : access.memory->uses)
        if (use.access.overlaps(access) && (use.access.writes || access.writes) && !use.covered_by(clock))
          race(use, stream, operation, access.writes);
      note(stream, time, operation, access);
    }
    return time;
  }

  void note(int stream, uint64_t time, const std::string& operation, const Access& access) {
    if (!access.memory) return;
    const Clock& clock = state().streams[stream].clock;
    auto& uses = access.memory->uses;
    // What the host knows to be over is before all that follows. What is before this write, and inside of it, is
    // before all that follows the write.
    auto settled = [&](const Use& use) {
      if (use.covered_by(state().host)) return true;
      if (!access.covers(use.access) || !use.covered_by(clock)) return false;
      return access.writes || (use.stream == stream && !use.access.writes);
    };
    uses.erase(std::remove_if(uses.begin(), uses.end(), settled), uses.end());
    uses.push_back({access, stream, time, operation});
  }

  void wait(int stream, const Clock& clock) { merge(state().streams[stream].clock, clock); }

  // The host has waited for all that a clock covers.
  void reach(const Clock& clock) {
    merge(state().host, clock);
    deliver([&](const Deferred& copy) { return copy.time <= state().host[copy.stream]; });
  }

  bool query(const Clock& clock, int& late) {
    if (covers(state().host, clock)) return true;
    if (late > 0) {
      --late;
      return false;
    }
    reach(clock);
    return true;
  }

  void defer(Deferred copy) { state().deferred.push_back(std::move(copy)); }

  void add(Memory* memory) {
    state().memories[memory->data] = memory;
    if (memory->device < 0) return;
    // The block may have been freed by work that is still in the allocation's stream.
    const uint64_t time = state().streams[memory->stream].clock[memory->stream];
    if (time > state().host[memory->stream])
      memory->uses.push_back({{memory, 0, memory->size, true}, memory->stream, time, ""});
  }

  void remove(Memory* memory) {
    state().memories.erase(memory->data);
    for (auto copy = state().deferred.begin(); copy != state().deferred.end();) {
      const auto next = std::next(copy);
      if (copy->device.memory == memory || copy->host.memory == memory)
        finished_.splice(finished_.end(), state().deferred, copy);
      copy = next;
    }
    if (memory->device < 0) return;
    Clock over = state().streams[memory->stream].clock;
    merge(over, state().host);
    for (int stream = 0; stream < stream_count; ++stream)
      if (memory->recorded[stream]) merge(over, state().streams[stream].clock);
    for (const Use& use : memory->uses)
      if (!use.covered_by(over))
        report("memory allocated on " + describe(memory->stream) + " is freed while " + describe(use.stream) +
               " may still use it (" + use.operation + "); record_stream is missing");
  }

  Memory* find(const void* address) {
    auto after = state().memories.upper_bound(static_cast<const char*>(address));
    if (after == state().memories.begin()) return nullptr;
    Memory* memory = std::prev(after)->second;
    return address < memory->data + memory->size ? memory : nullptr;
  }

 private:
  template <typename Condition>
  void deliver(const Condition& is_due) {
    for (auto copy = state().deferred.begin(); copy != state().deferred.end();) {
      const auto next = std::next(copy);
      if (is_due(*copy)) {
        const char* source = copy->snapshot.empty() ? copy->source : copy->snapshot.data();
        copy_elements(copy->target, copy->target_strides.data(), source, copy->source_strides.data(),
                      copy->sizes.data(), copy->sizes.size(), copy->item_size);
        finished_.splice(finished_.end(), state().deferred, copy);
      }
      copy = next;
    }
  }

  void race(const Use& use, int stream, const std::string& operation, bool writes) {
    std::string text = operation + " on " + describe(stream) + (writes ? " writes memory " : " reads memory ");
    if (use.operation.empty())
      text += "allocated on " + describe(use.stream);
    else
      text += (use.access.writes ? "written by " : "read by ") + use.operation + " on " + describe(use.stream);
    report(text + " without waiting for it");
  }

  void report(const std::string& text) {
    auto& violations = state().violations;
    const bool is_new = std::find(violations.begin(), violations.end(), text) == violations.end();
    if (is_new && violations.size() < most_violations) violations.push_back(text);
  }

  std::list<Deferred> finished_;  // destroyed after `lock_` is
  std::lock_guard<std::mutex> lock_{state().mutex};
};

void synchronize_stream(int stream) {
  Session session;
  ++state().stream_synchronizations;
  session.reach(state().streams[stream].clock);
}

// ---------------------------------------------------------------------------------------------------------------------
// Allocation

void release(void* context) {
  auto* memory = static_cast<Memory*>(context);
  Session().remove(memory);
  std::free(memory->data);
  delete memory;
}

c10::DataPtr allocate(c10::Device device, size_t size) {
  if (size == 0) return {nullptr, device};
  const bool pinned = device.is_cpu();
  char* data = nullptr;
  TORCH_CHECK(posix_memalign(reinterpret_cast<void**>(&data), 64, size) == 0, "sim: out of memory");
  std::memset(data, poison, size);
  auto* memory = new Memory{data, size};
  if (!pinned) {
    memory->device = device.index();
    memory->stream = current_stream(device.index());
  }
  Session().add(memory);
  return {data, memory, &release, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return ::allocate(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device)), size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return ::allocate(c10::Device(c10::kCPU), size); }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

void record_stream(const void* data, int stream) {
  Session session;
  if (Memory* memory = session.find(data)) memory->recorded.set(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Devices, streams and events, as c10 asks for them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "not a sim device: ", device);
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < device_count, "sim: invalid device index ", static_cast<int>(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    Session session;
    ++state().device_synchronizations;
    const int first = (index < 0 ? current_device : index) * streams_per_device;
    for (int stream = first; stream < first + streams_per_device; ++stream)
      session.reach(state().streams[stream].clock);
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Session session;
    int& handed_out = state().handed_out[index_of(device)];
    handed_out = handed_out % (streams_per_device - 1) + 1;
    return stream(device, handed_out);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &state().streams[number_of(stream)];
  }
  bool queryStream(const c10::Stream& stream) const override {
    Session session;
    Stream& queried = state().streams[number_of(stream)];
    return session.query(queried.clock, queried.late);
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(number_of(stream)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Session session;
    if (!*event) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    recorded->clock = state().streams[number_of(stream)].clock;
    recorded->late = state().lateness;
    recorded->recorded = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Session().wait(number_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* queried = static_cast<Event*>(event);
    return !event || Session().query(queried->clock, queried->late);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Session session;
    ++state().stream_synchronizations;
    session.reach(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), number_of(stream));
  }

 private:
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Device device(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(c10::Device of, int id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index_of(of)), id);
  }
};

void resize_storage(c10::StorageImpl& storage, size_t size) {
  const c10::Device device = storage.device();
  c10::DataPtr fresh = allocate(device, size);
  if (const size_t kept = std::min(size, storage.nbytes())) {
    {
      Session session;
      Memory* before = session.find(storage.data());
      Memory* after = session.find(fresh.get());
      session.enqueue(current_stream(device.index()), "resize", {{before, 0, kept, false}, {after, 0, kept, true}});
    }
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({c10::kPrivateUse1, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({c10::kPrivateUse1, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override {
    Session session;
    const Memory* memory = session.find(data);
    return memory && memory->device < 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* data) const override {
    Session session;
    const Memory* memory = session.find(data);
    TORCH_CHECK(memory && memory->device >= 0, "sim: not an address of a device");
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(memory->device)};
  }
  // Operations run on the host, and draw from the host's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Operations: each runs on CPU tensors that share the device's memory

constexpr c10::DispatchKeySet device_keys(c10::DispatchKey::PrivateUse1);

Access access_to(Session& session, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  const char* data = static_cast<const char*>(tensor.storage().data());
  Memory* memory = session.find(data);
  if (!memory) return {};
  int64_t last = tensor.storage_offset();
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  const size_t start = data - memory->data;
  return {memory, start + tensor.storage_offset() * tensor.itemsize(), start + (last + 1) * tensor.itemsize(), writes};
}

c10::Storage host_storage(const c10::Storage& storage) {
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                            std::move(data), c10::GetAllocator(c10::kCPU), true));
}

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return make_tensor(host_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

// What an accelerator cannot answer without the host's waiting: values, and shapes that depend on values.
bool waits_for_the_device(const std::string& operation) {
  static const std::set<std::string> names{"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                                           "aten::masked_select", "aten::_unique", "aten::_unique2",
                                           "aten::unique_dim", "aten::unique_consecutive",
                                           "aten::unique_dim_consecutive", "aten::repeat_interleave"};
  return names.count(operation) > 0;
}

// The few operations that accept indices on the host for a tensor on a device.
bool takes_host_tensors(const std::string& operation) { return operation.find("index") != std::string::npos; }

// One operation's tensors, lent to the host and given back.
class HostCall {
 public:
  explicit HostCall(std::string operation) : operation_(std::move(operation)) {}

  c10::IValue lend(const c10::IValue& value, const c10::AliasInfo* alias) {
    if (value.isTensor()) return lend(value.toTensor(), alias);
    if (value.isTensorList()) {
      c10::List<at::Tensor> lent;
      for (const at::Tensor& tensor : value.toTensorVector()) lent.push_back(lend(tensor, alias));
      return lent;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> lent;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        lent.push_back(tensor ? std::optional<at::Tensor>(lend(*tensor, alias)) : std::nullopt);
      return lent;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      if (device_ < 0) device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  void begin() {
    TORCH_CHECK(device_ < 0 || !has_host_tensor_ || takes_host_tensors(operation_), operation_,
                ": expected all tensors to be on the same device, found one on sim:", device_, " and one on cpu");
    if (device_ < 0) device_ = current_device;
    stream_ = current_stream(device_);
    Session session;
    std::vector<Access> accesses;
    for (const Loan& loan : loans_)
      if (loan.touches) accesses.push_back(access_to(session, loan.device, loan.writes));
    time_ = session.enqueue(stream_, operation_, accesses);
  }

  c10::DispatchKeySet host_keys() const {
    return c10::DispatchKeySet(sparse_.empty() ? c10::DispatchKey::CPU : c10::DispatchKey::SparseCPU);
  }

  void end() {
    for (const Loan& loan : loans_)
      if (loan.writes) write_back(loan);
    for (const Loan& loan : sparse_) {
      if (!loan.writes) continue;
      auto* tensor = static_cast<at::SparseTensorImpl*>(loan.device.unsafeGetTensorImpl());
      tensor->resize_(loan.host.sparse_dim(), loan.host.dense_dim(), loan.host.sizes());
      tensor->set_indices_and_values_unsafe(give_back(loan.host._indices()), give_back(loan.host._values()));
      tensor->set_coalesced(loan.host.is_coalesced());
    }
    if (waits_for_the_device(operation_)) synchronize_stream(stream_);
  }

  c10::IValue give_back(const c10::IValue& value) {
    if (value.isTensor()) return give_back(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> returned;
    for (const at::Tensor& tensor : value.toTensorVector()) returned.push_back(give_back(tensor));
    return returned;
  }

 private:
  struct Loan {
    at::Tensor device;
    at::Tensor host;
    bool touches;
    bool writes;
  };

  at::Tensor lend(const at::Tensor& tensor, const c10::AliasInfo* alias) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      has_host_tensor_ |= tensor.dim() > 0;
      host_tensors_.push_back(tensor);
      return tensor;
    }
    if (tensor.is_sparse()) return lend_sparse(tensor, alias);
    TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), operation_,
                ": expected all tensors to be on the same device, found sim:", device_, " and ", tensor.device());
    device_ = tensor.device().index();
    // One host storage for each of the device's, so that the operation sees which tensors share memory.
    auto [found, is_new] = storages_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) found->second = host_storage(tensor.storage());
    at::Tensor host = make_tensor(found->second, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
    const bool writes = alias && alias->isWrite();
    loans_.push_back({tensor, host, writes || !alias, writes});  // an alias that is not written is a view: no access
    return host;
  }

  at::Tensor lend_sparse(const at::Tensor& tensor, const c10::AliasInfo* alias) {
    at::Tensor host = sparse(lend(tensor._indices(), alias), lend(tensor._values(), alias), tensor);
    sparse_.push_back({tensor, host, true, alias && alias->isWrite()});
    return host;
  }

  static at::Tensor sparse(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
    at::Tensor made = at::_sparse_coo_tensor_unsafe(indices, values, like.sizes());
    return made._coalesced_(like.is_coalesced());
  }

  at::Tensor give_back(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const Loan& loan : sparse_)
      if (loan.host.is_same(result)) return loan.device;
    if (result.is_sparse()) return sparse(give_back(result._indices()), give_back(result._values()), result);
    for (const Loan& loan : loans_)
      if (loan.host.is_same(result)) return loan.device;
    for (const at::Tensor& tensor : host_tensors_)
      if (tensor.is_same(result)) return result;
    for (const Loan& loan : loans_)
      if (loan.host.storage().is_alias_of(result.storage()))
        return make_tensor(loan.device.storage(), device_keys, result);
    return to_device(result);
  }

  at::Tensor to_device(const at::Tensor& result) {
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_));
    const size_t size = result.storage().nbytes();
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size,
                                                               allocate(device, size), &device_allocator, true));
    if (size) std::memcpy(storage.mutable_data(), result.storage().data(), size);
    at::Tensor made = make_tensor(std::move(storage), device_keys, result);
    Session session;
    session.note(stream_, time_, operation_, access_to(session, made, true));
    return made;
  }

  // An `out=` argument may have got another shape, or other memory.
  void write_back(const Loan& loan) {
    c10::StorageImpl& storage = *loan.device.storage().unsafeGetStorageImpl();
    const c10::Storage& host = loan.host.storage();
    if (host.data() != storage.data()) {
      if (host.nbytes() != storage.nbytes()) resize_storage(storage, host.nbytes());
      if (host.nbytes()) std::memcpy(storage.mutable_data(), host.data(), host.nbytes());
      Session session;
      session.note(stream_, time_, operation_, access_to(session, loan.host, true));
    }
    loan.device.unsafeGetTensorImpl()->set_sizes_and_strides(loan.host.sizes(), loan.host.strides(),
                                                             loan.host.storage_offset());
  }

  std::string operation_;
  int device_ = -1;
  int stream_ = 0;
  uint64_t time_ = 0;
  bool has_host_tensor_ = false;
  std::vector<Loan> loans_;
  std::vector<Loan> sparse_;  // their indices and values are in `loans_`
  std::vector<at::Tensor> host_tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& arguments = operation.schema().arguments();
  at::AutoDispatchBelowADInplaceOrView below;
  HostCall call(operation.schema().name());
  const size_t first = stack->size() - arguments.size();
  for (size_t index = 0; index < arguments.size(); ++index)
    (*stack)[first + index] = call.lend((*stack)[first + index], arguments[index].alias_info());
  call.begin();
  operation.redispatchBoxed(call.host_keys(), stack);
  call.end();
  for (size_t index = first; index < stack->size(); ++index) (*stack)[index] = call.give_back((*stack)[index]);
}

void fall_back(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_on_host(operation, stack);
}

// PyTorch has convolutions of its own for the devices that it knows, and two operations for the others to override.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_host(operation, stack);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // The host's operation has one argument more, the sizes of the bias, after the weight.
  const auto arguments = stack->end() - 10;
  const at::Tensor gradient = arguments->toTensor();
  stack->insert(arguments + 3, c10::IValue(std::vector<int64_t>{gradient.size(1)}));
  run_on_host(operation, stack);
}

// The cells of recurrent networks, which PyTorch takes to be fused on every device but the host: written out, so that
// autograd differentiates them.
at::Tensor with_bias(const at::Tensor& gates, const at::Tensor& bias) { return bias.defined() ? gates + bias : gates; }

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  const at::Tensor workspace = with_bias(input_gates, input_bias.value_or(at::Tensor())) +
                               with_bias(hidden_gates, hidden_bias.value_or(at::Tensor()));
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, workspace};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias.value_or(at::Tensor())).chunk(3, 1);
  const auto state = with_bias(hidden_gates, hidden_bias.value_or(at::Tensor())).chunk(3, 1);
  const at::Tensor next = (input[2] + (input[0] + state[0]).sigmoid() * state[2]).tanh();
  return {next + (input[1] + state[1]).sigmoid() * (hidden - next), next};
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_generic(size, &device_allocator, device_keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, device_keys, c10::dtype_or_default(dtype));
}

void grow_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(*tensor.storage().unsafeGetStorageImpl(), needed);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() != size) tensor->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == c10::kPrivateUse1, "set_: expected a storage on sim, got ", source.device());
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.data() || size.empty())
    tensor->set_sizes_and_strides(size, stride);
  else
    tensor->set_sizes_contiguous(size);
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, count, 1);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             c10::DataPtr(nullptr, self.device()), &device_allocator,
                                                             true));
  return set_storage_offset(self, std::move(storage), 0, 0, 1);
}

void record_tensor(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data(), number_of(stream)); }

// ---------------------------------------------------------------------------------------------------------------------
// Copies

void copy_on_host(const at::Tensor& source, const at::Tensor& target) {
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(target).copy_(on_host(source));
}

// On the source's stream; between two devices, after all that both streams hold, and before all that follows on either.
void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  const int source_stream = current_stream(source.device().index());
  const int target_stream = current_stream(target.device().index());
  {
    Session session;
    session.wait(source_stream, state().streams[target_stream].clock);
    session.enqueue(source_stream, "aten::copy_",
                    {access_to(session, source, false), access_to(session, target, true)});
    session.wait(target_stream, state().streams[source_stream].clock);
  }
  copy_on_host(source, target);
}

// Whether a copy can be left to the device: anything that needs a conversion passes through pageable memory first.
bool can_be_deferred(const at::Tensor& source, const at::Tensor& target) {
  const at::Tensor& host = source.is_cpu() ? source : target;
  if (source.dtype() != target.dtype() || source.sizes() != target.sizes() || !host.is_non_overlapping_and_dense() ||
      source.is_conj() != target.is_conj() || source.is_neg() != target.is_neg())
    return false;
  return host.is_contiguous() || source.strides() == target.strides();
}

void copy_with_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool to_device = target.is_privateuseone();
  const at::Tensor& on_device = to_device ? target : source;
  const at::Tensor& host = to_device ? source : target;
  const int stream = current_stream(on_device.device().index());
  char* host_data = static_cast<char*>(const_cast<void*>(host.const_data_ptr()));
  char* device_data = static_cast<char*>(const_cast<void*>(on_device.const_data_ptr()));
  Deferred copy{stream, 0, host.storage(), {}, {}, {}, {}, {}, {}, host.itemsize(), nullptr, nullptr};
  bool pinned = false;
  {
    Session session;
    const Access device_access = access_to(session, on_device, to_device);
    const Access host_access = access_to(session, host, !to_device);  // of pinned memory; else it has none
    pinned = host_access.memory != nullptr;
    copy.time = session.enqueue(stream, "aten::copy_", {device_access, host_access});
    if (non_blocking && pinned && can_be_deferred(source, target)) {
      copy.sizes = host.sizes().vec();
      copy.host = host_access;
      if (to_device) {
        copy.device = device_access;
        copy.target_strides = target.strides().vec();
        copy.source_strides = source.strides().vec();
        copy.source = host_data;
        copy.target = device_data;
      } else {
        copy.target_strides = copy.source_strides = host.strides().vec();
        copy.snapshot.resize(host.nbytes());
        copy_elements(copy.snapshot.data(), copy.target_strides.data(), device_data, source.strides().data(),
                      copy.sizes.data(), copy.sizes.size(), copy.item_size);
        copy.target = host_data;
        std::memset(host_data, poison, host.nbytes());
      }
      session.defer(std::move(copy));
      return;
    }
  }
  copy_on_host(source, target);
  synchronize_stream(stream);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (source.is_privateuseone() && target.is_privateuseone())
    copy_on_devices(source, target);
  else
    copy_with_host(source, target, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// Registration

std::vector<std::string> violations() {
  Session session;
  return state().violations;
}

void forget() {
  Session session;
  state().violations.clear();
  state().device_synchronizations = state().stream_synchronizations = 0;
}

std::vector<int64_t> synchronizations() {
  Session session;
  return {state().device_synchronizations, state().stream_synchronizations};
}

void set_lateness(int64_t lateness) {
  Session session;
  state().lateness = static_cast<int>(lateness);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  // No other thread holds the mutex at a fork, so the child finds it free.
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
  return true;
}();

TORCH_LIBRARY(telegrad_sim, library) {
  library.def("violations() -> str[]", &violations);
  library.def("forget() -> ()", &forget);
  library.def("synchronizations() -> int[]", &synchronizations);
  library.def("set_lateness(int lateness) -> ()", &set_lateness);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Under autograd's key, where what they are made of is recorded, and for inference mode, which does without.
void register_cells(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

// PyTorch's makers of sparse tensors take the current device: this makes it the one that is asked for.
template <auto make>
struct made_on_device;

template <typename... Arguments, at::Tensor (*make)(Arguments...)>
struct made_on_device<make> {
  static at::Tensor call(Arguments... arguments) {
    std::optional<c10::Device> device;
    ((device = device_in(arguments, device)), ...);
    const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
    return make(std::forward<Arguments>(arguments)...);
  }

 private:
  using Found = std::optional<c10::Device>;
  static Found device_in(const Found& asked_for, const Found& found) { return asked_for ? asked_for : found; }
  template <typename Other>
  static Found device_in(const Other&, const Found& found) { return found; }
};

// Sparse tensors are pairs of dense ones, which PyTorch's own code handles for any device.
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("empty.memory_format", &made_on_device<&at::native::empty_sparse>::call);
  library.impl("_sparse_coo_tensor_with_dims", &made_on_device<&at::native::new_with_dims_sparse>::call);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors",
               &made_on_device<&at::native::new_with_dims_and_tensor_sparse_symint>::call);
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  library.impl("indices", &at::native::indices_sparse);
  library.impl("values", &at::native::values_sparse);
  library.impl("_nnz", &at::native::_nnz_sparse);
  library.impl("sparse_dim", &at::native::sparse_dim_sparse);
  library.impl("dense_dim", &at::native::dense_dim_sparse);
  library.impl("is_coalesced", &at::native::is_coalesced_sparse);
  library.impl("_coalesced_", &at::native::_coalesced_sparse_);
  library.impl("clone", &at::native::clone_sparse);
  library.impl("copy_", &at::native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
}

// A copy resolves conjugation and negation itself; PyTorch would resolve them with a copy.
void register_lazy_copy(torch::Library& library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Conjugate, library) { register_lazy_copy(library); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { register_lazy_copy(library); }

// Autocast changes nothing here.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { register_cells(library); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { register_cells(library); }

}  // namespace
