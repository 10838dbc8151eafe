// The kernel on a GPU, against a walk over every byte. Of torch only number types: this is what
// compute-sanitizer runs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cast_tile.h"
#include "cuda/copy_engine.h"
#include "geometry/copy_jobs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/random_copies.h"
#include "tests/testing/seed.h"

extern "C" const loadplan::CopyEngine* loadplan_cuda_copy_engine();

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::Map;
using ::loadplan::testing::MemoryCopy;
using ::loadplan::testing::RandomMemoryCopy;
using ::loadplan::testing::Uniform;

#define ASSERT_CUDA(call) ASSERT_STREQ(cudaGetErrorString(call), cudaGetErrorString(cudaSuccess))

const CopyEngine& Engine() { return *loadplan_cuda_copy_engine(); }

// Memory of the device.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t nbytes) : nbytes_(nbytes) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(nbytes, 1)), cudaSuccess);
  }
  template <typename T>
  explicit DeviceMemory(std::span<const T> values) : DeviceMemory(values.size_bytes()) {
    Set(values.data());
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), nbytes_(other.nbytes_) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  void Set(const void* values) const {
    EXPECT_EQ(cudaMemcpy(data_, values, nbytes_, cudaMemcpyHostToDevice), cudaSuccess);
    // It may return before the device has them, and the test's stream waits for no other.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  std::vector<std::byte> Get() const {
    std::vector<std::byte> bytes(nbytes_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, nbytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }
  void* data() const { return data_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t nbytes_;
};

class CopyEngineGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) GTEST_SKIP() << "no GPU: " << cudaGetErrorString(error);
    if (count == 0) GTEST_SKIP() << "no GPU";
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // Jobs [0, num_planned) as those of a plan.
  void RunLarge(std::span<const CopyJob> jobs, std::size_t num_planned,
                std::vector<CopyItem> items) {
    const std::span<const CopyJob> planned = jobs.first(num_planned);
    const std::span<const CopyJob> extra = jobs.subspan(num_planned);
    CopyBatch batch;
    batch.num_tiles = NumberTiles(planned, extra, items);
    const DeviceMemory planned_there(planned);
    const DeviceMemory extra_there(extra);
    const DeviceMemory items_there{std::span<const CopyItem>(items)};
    batch.planned = static_cast<const CopyJob*>(planned_there.data());
    batch.extra = static_cast<const CopyJob*>(extra_there.data());
    batch.items = static_cast<const CopyItem*>(items_there.data());
    batch.num_planned = static_cast<std::uint32_t>(planned.size());
    batch.num_items = static_cast<std::uint32_t>(items.size());
    batch.has_casts = HasCasts(jobs);
    ASSERT_EQ(Engine().run(batch, stream_), nullptr);
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
  }
  static bool HasCasts(std::span<const CopyJob> jobs) {
    return std::ranges::any_of(jobs, [](const CopyJob& job) { return !job.cast.is_none(); });
  }
  static SmallCopyBatch SmallBatch(std::span<const CopyJob> jobs, std::span<const CopyItem> items) {
    SmallCopyBatch batch;
    batch.num_items = static_cast<std::uint32_t>(items.size());
    for (std::uint32_t i = 0; i < batch.num_items; ++i) {
      batch.jobs[i] = jobs[items[i].job];
      batch.items[i] = {items[i].from, i, 0};
    }
    batch.num_tiles = NumberTiles({}, batch.jobs, std::span(batch.items).first(batch.num_items));
    batch.has_casts = HasCasts(jobs);
    return batch;
  }
  void RunSmall(std::span<const CopyJob> jobs, std::span<const CopyItem> items) {
    ASSERT_EQ(Engine().run_small(SmallBatch(jobs, items), stream_), nullptr);
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
  }

  cudaStream_t stream_ = nullptr;
};

class CopyEngineGpuPropertyTest : public CopyEngineGpuTest {
 protected:
  void RunRandomBatch(std::mt19937& gen) {
    std::vector<MemoryCopy> copies;
    std::vector<DeviceMemory> to;
    std::vector<DeviceMemory> from;
    std::vector<CopyJob> jobs;
    std::vector<CopyItem> items;
    for (Index n = Uniform(gen, 1, 12); n > 0; --n) {
      copies.push_back(RandomMemoryCopy(gen));
      const MemoryCopy& copy = copies.back();
      to.emplace_back(std::span<const std::byte>(copy.to.data(), copy.to.nbytes()));
      from.emplace_back(std::span<const std::byte>(copy.from.data(), copy.from.nbytes()));
      const std::size_t first = jobs.size();
      ASSERT_TRUE(AppendCopyJobs(copy.map, to.back().address(), 1U << 20, &jobs));
      for (std::size_t job = first; job < jobs.size(); ++job) {
        items.push_back({from.back().address() + static_cast<std::uint64_t>(copy.from_start),
                         static_cast<std::uint32_t>(job), 0});
      }
    }
    std::shuffle(items.begin(), items.end(), gen);
    if (items.size() <= kSmallCopyBatch && Uniform(gen, 0, 1) == 0) {
      RunSmall(jobs, items);
    } else {
      const Index num_planned = Uniform(gen, 0, static_cast<Index>(jobs.size()));
      RunLarge(jobs, static_cast<std::size_t>(num_planned), items);
    }
    for (std::size_t i = 0; i < copies.size(); ++i) {
      SCOPED_TRACE(ToString(copies[i].map));
      ASSERT_EQ(to[i].Get(), copies[i].want);
    }
  }
};

TEST_F(CopyEngineGpuPropertyTest, CopiesEveryByteOfEveryJob) {
  ForEachRandom(500, [this](std::mt19937& gen) { RunRandomBatch(gen); });
}

// Numbers that both sides of any pair have: the host and a device convert those alike. What they
// make of all others, NaN among them, tests/python/test_gpu.py compares with torch.
struct CastDType {
  c10::ScalarType dtype;
  Index itemsize;

  std::int8_t code() const { return static_cast<std::int8_t>(dtype); }
};
const std::vector<CastDType> kCastDTypes = {
    {c10::ScalarType::Double, 8},        {c10::ScalarType::Float, 4},
    {c10::ScalarType::Half, 2},          {c10::ScalarType::BFloat16, 2},
    {c10::ScalarType::Float8_e4m3fn, 1}, {c10::ScalarType::Float8_e5m2, 1},
    {c10::ScalarType::Bool, 1},          {c10::ScalarType::Byte, 1},
    {c10::ScalarType::Char, 1},          {c10::ScalarType::Short, 2},
    {c10::ScalarType::Int, 4},           {c10::ScalarType::Long, 8}};

// By the host, one item.
void HostCast(std::byte* to, const std::byte* from, CopyCast cast, const StridedMap& map) {
  std::vector<CopyJob> jobs;
  const StridedMap one = Map({}, {0, {}, map.to().itemsize}, {0, {}, map.from().itemsize}, true);
  alignas(8) std::byte source[8];
  alignas(8) std::byte result[8];
  if (cast.from == cast.to) return static_cast<void>(std::copy_n(from, map.to().itemsize, to));
  std::copy_n(from, map.from().itemsize, source);
  ASSERT_TRUE(AppendCopyJobs(one, reinterpret_cast<std::uint64_t>(result), 1, &jobs, cast));
  const std::vector<CopyItem> items = {{reinterpret_cast<std::uint64_t>(source), 0, 0}};
  CopyBatch batch;
  batch.extra = jobs.data();
  batch.items = items.data();
  batch.num_items = batch.num_tiles = 1;
  CopyTile(batch, 0, 0, 1, TorchCasts());
  std::copy_n(result, map.to().itemsize, to);
}

TEST_F(CopyEngineGpuPropertyTest, CastsEveryItemOfEveryJob) {
  ForEachRandom(300, [this](std::mt19937& gen) {
    const CastDType from_dtype = testing::Pick(gen, kCastDTypes);
    const CastDType to_dtype = testing::Pick(gen, kCastDTypes);
    const CopyCast cast{from_dtype.code(), to_dtype.code()};
    ASSERT_EQ(Engine().has_cast(cast), TorchCasts::Has(cast));
    if (!TorchCasts::Has(cast)) return;
    const Index from_itemsize = from_dtype.itemsize;
    const StridedMap map = testing::RandomCastMap(gen, to_dtype.itemsize, from_itemsize);
    SCOPED_TRACE(ToString(map));
    const Index start = from_itemsize * Uniform(gen, 0, 20);
    std::vector<std::byte> source(static_cast<std::size_t>(start + map.FromSpan().stop));
    for (std::size_t i = 0; i + 8 <= source.size(); i += static_cast<std::size_t>(from_itemsize)) {
      // A small whole number, as bytes of its dtype.
      const std::int64_t number = Uniform(gen, 0, 100);
      HostCast(source.data() + i, reinterpret_cast<const std::byte*>(&number),
               {static_cast<std::int8_t>(c10::ScalarType::Long), cast.from},
               Map({}, {0, {}, from_itemsize}, {0, {}, 8}, true));
    }
    std::vector<std::byte> want(static_cast<std::size_t>(map.ToSpan().stop) + 8, std::byte{77});
    const DeviceMemory from{std::span<const std::byte>(source)};
    const DeviceMemory to{std::span<const std::byte>(want)};
    ForEachRun(map, [&](Index to_byte, Index from_byte, Index) {
      HostCast(want.data() + to_byte, source.data() + start + from_byte, cast, map);
    });
    std::vector<CopyJob> jobs;
    std::vector<CopyItem> items;
    ASSERT_TRUE(AppendCopyJobs(map, to.address(), 1U << 20, &jobs, cast));
    for (std::uint32_t job = 0; job < jobs.size(); ++job) {
      items.push_back({from.address() + static_cast<std::uint64_t>(start), job, 0});
    }
    if (items.size() <= kSmallCopyBatch) {
      RunSmall(jobs, items);
    } else {
      RunLarge(jobs, jobs.size() / 2, items);
    }
    ASSERT_EQ(to.Get(), want);
  });
}

// An expert layer of Kimi-K2 at an eighth of its width on rank 1 of 8: columns and rows.
TEST_F(CopyEngineGpuTest, CopiesALayerOfManyWrites) {
  constexpr Index kExperts = 384;
  constexpr Index kHidden = 896;
  constexpr Index kShard = 32;
  const StridedMap rows =
      Map({}, {0, {}, kShard * kHidden * 2}, {kShard * kHidden * 2, {}, kShard * kHidden * 2});
  const StridedMap columns =
      Map({kHidden}, {0, {kShard * 2}, kShard * 2}, {kShard * 2, {8 * kShard * 2}, kShard * 2});
  const auto nbytes = static_cast<std::size_t>(rows.nbytes());
  std::vector<std::byte> bytes(8 * nbytes);
  std::mt19937 gen(1);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(gen()); });
  const DeviceMemory source{std::span<const std::byte>(bytes)};
  const DeviceMemory to(2 * kExperts * nbytes);
  std::vector<CopyJob> jobs;
  std::vector<CopyItem> items;
  for (Index e = 0; e < kExperts; ++e) {
    for (const StridedMap& map : {rows, columns}) {
      items.push_back({source.address(), static_cast<std::uint32_t>(jobs.size()), 0});
      ASSERT_TRUE(AppendCopyJobs(map, to.address() + jobs.size() * nbytes, 1, &jobs));
    }
  }
  RunLarge(jobs, jobs.size(), items);
  const std::vector<std::byte> got = to.Get();
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    std::vector<std::byte> want(nbytes);
    ForEachRun(job % 2 == 0 ? rows : columns, [&](Index to_byte, Index from_byte, Index count) {
      std::copy_n(bytes.begin() + from_byte, count, want.begin() + to_byte);
    });
    ASSERT_TRUE(std::equal(want.begin(), want.end(),
                           got.begin() + static_cast<std::ptrdiff_t>(job * nbytes)))
        << job;
  }
}

TEST_F(CopyEngineGpuTest, CopiesMoreThanOneJobCan) {
  constexpr std::size_t kNbytes = (std::size_t{5} << 29) + 48;
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  if (free < 3 * kNbytes) GTEST_SKIP() << "too little memory on this GPU";
  const DeviceMemory from(kNbytes);
  const DeviceMemory to(kNbytes);
  ASSERT_CUDA(cudaMemset(to.data(), 1, kNbytes));
  for (std::size_t start = 0; start < kNbytes; start += std::size_t{1} << 24) {
    ASSERT_CUDA(cudaMemset(static_cast<char*>(from.data()) + start, static_cast<int>(start >> 24),
                           std::min(kNbytes - start, std::size_t{1} << 24)));
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<CopyJob> jobs;
  const auto nbytes = static_cast<Index>(kNbytes);
  ASSERT_TRUE(AppendCopyJobs(Map({}, {0, {}, nbytes}, {0, {}, nbytes}), to.address(), 4, &jobs));
  ASSERT_EQ(jobs.size(), 3U);
  std::vector<CopyItem> items;
  for (std::uint32_t job = 0; job < 3; ++job) items.push_back({from.address(), job, 0});
  RunSmall(jobs, items);
  EXPECT_TRUE(to.Get() == from.Get());
}

TEST_F(CopyEngineGpuTest, KeepsTheOrderOfBatchesOnAStream) {
  const std::vector<std::byte> ones(100000, std::byte{1});
  const std::vector<std::byte> twos(100000, std::byte{2});
  const DeviceMemory first{std::span<const std::byte>(ones)};
  const DeviceMemory second{std::span<const std::byte>(twos)};
  const DeviceMemory to(100000);
  std::vector<CopyJob> jobs;
  ASSERT_TRUE(AppendCopyJobs(Map({}, {0, {}, 100000}, {0, {}, 100000}), to.address(), 1, &jobs));
  for (int i = 0; i < 50; ++i) {
    for (const DeviceMemory* from : {&first, &second}) {
      const CopyItem item{from->address(), 0, 0};
      ASSERT_EQ(Engine().run_small(SmallBatch(jobs, {&item, 1}), stream_), nullptr);
    }
  }
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(to.Get(), twos);
}

// A small batch is an argument: a graph that has captured it needs nothing of the host again.
TEST_F(CopyEngineGpuTest, CanBeCapturedWhereTheBatchIsSmall) {
  const DeviceMemory from(4096);
  const DeviceMemory to(4096);
  std::vector<CopyJob> jobs;
  ASSERT_TRUE(AppendCopyJobs(Map({}, {0, {}, 4096}, {0, {}, 4096}), to.address(), 1, &jobs));
  EXPECT_FALSE(Engine().is_capturing(stream_));
  ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(Engine().is_capturing(stream_));
  {
    const CopyItem item{from.address(), 0, 0};
    ASSERT_EQ(Engine().run_small(SmallBatch(jobs, {&item, 1}), stream_), nullptr);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (const int value : {3, 4}) {
    ASSERT_CUDA(cudaMemset(from.data(), value, 4096));
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_CUDA(cudaGraphLaunch(executable, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    EXPECT_EQ(to.Get(), std::vector<std::byte>(4096, static_cast<std::byte>(value)));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace loadplan
