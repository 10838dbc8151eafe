#include "transfer/range_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"
#include "transfer/leased_window.h"
#include "transfer/read_fully.h"

namespace loadplan {
namespace {

// Of memory, offsets and lengths: what every disk takes.
constexpr Index kDirectUnit = 4096;

Index RoundDown(Index value) { return value - value % kDirectUnit; }
Index RoundUp(Index value) { return RoundDown(value + kDirectUnit - 1); }

// What one thread reads in one go.
constexpr Index kTaskNbytes = Index{2} << 20;
constexpr std::size_t kTaskJobs = 512;
// Longer reads keep a disk busy by themselves, and the kernel would fetch their start only.
constexpr Index kMaxAdvised = Index{1} << 19;

std::vector<ReadJob> Cut(const std::vector<ReadJob>& jobs) {
  std::vector<ReadJob> parts;
  parts.reserve(jobs.size());
  for (ReadJob job : jobs) {
    while (job.nbytes > 0) {
      parts.push_back(job);
      ReadJob& part = parts.back();
      part.nbytes = std::min(job.nbytes, RangeReader::kMaxRead);
      job.offset += part.nbytes;
      job.nbytes -= part.nbytes;
      job.tag += part.nbytes;
      if (job.to != nullptr) job.to += part.nbytes;
    }
  }
  return parts;
}

// Advice: where the kernel takes none, reads fetch for themselves.
void Advise(const std::vector<ReadJob>& jobs) {
  for (const ReadJob& job : jobs) {
    if (job.nbytes > kMaxAdvised) continue;
    (void)posix_fadvise(job.fd, job.offset, job.nbytes, POSIX_FADV_WILLNEED);
  }
}

}  // namespace

RangeReader::RangeReader(const Options& options)
    : direct_(options.direct), advises_(options.advises && !options.direct) {
  const int num_threads = std::max(1, options.num_threads);
  threads_.reserve(static_cast<std::size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) {
    try {
      threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      break;  // the machine has no more threads: those that run will do
    }
  }
}

RangeReader::~RangeReader() {
  Cancel();
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (const auto& [fd, direct_fd] : direct_fds_) {
    if (direct_fd >= 0) close(direct_fd);
  }
}

std::shared_ptr<ReadGroup> RangeReader::Submit(const std::vector<ReadJob>& jobs, AfterRead then,
                                               Index scratch_nbytes) {
  if (advises_) Advise(jobs);
  auto group = std::make_shared<ReadGroup>();
  group->jobs = Cut(jobs);
  group->then = std::move(then);
  group->scratch_nbytes = scratch_nbytes;
  return SubmitGroup(std::move(group));
}

std::shared_ptr<ReadGroup> RangeReader::SubmitMapped(const std::vector<ReadJob>& jobs,
                                                     AfterRead then, Index nbytes) {
  auto group = std::make_shared<ReadGroup>();
  group->jobs = jobs;
  group->then = std::move(then);
  group->scratch_nbytes = jobs.back().tag + jobs.back().nbytes;
  group->mapped_nbytes = nbytes;
  return SubmitGroup(std::move(group));
}

std::shared_ptr<ReadGroup> RangeReader::SubmitGroup(std::shared_ptr<ReadGroup> group) {
  std::vector<Task> tasks;
  Index nbytes = 0;
  for (std::size_t i = 0; i < group->jobs.size(); ++i) {
    nbytes += group->jobs[i].nbytes;
    const bool goes_on =
        !tasks.empty() && (group->scratch_nbytes > 0 ||
                           (nbytes <= kTaskNbytes && i - tasks.back().first < kTaskJobs));
    if (!goes_on) {
      tasks.push_back({group, i, i});
      nbytes = group->jobs[i].nbytes;
    }
    tasks.back().stop = i + 1;
  }
  group->num_left = tasks.size();
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(tasks, std::back_inserter(tasks_));
  }
  has_work_.notify_all();
  return group;
}

bool RangeReader::WaitFor(const ReadGroup& group, double seconds) {
  std::unique_lock lock(mutex_);
  return has_news_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return group.num_left == 0; });
}

absl::Status RangeReader::StatusOf(const ReadGroup& group) const {
  const std::lock_guard lock(mutex_);
  return group.status;
}

void RangeReader::Cancel() {
  std::unique_lock lock(mutex_);
  tasks_.clear();
  has_news_.wait(lock, [this] { return num_running_ == 0; });
}

void RangeReader::Work() {
  Memory memory;
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return stops_ || !tasks_.empty(); });
    if (stops_) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    ReadGroup& group = *task.group;
    ++num_running_;
    const auto unlocked = [&](const auto& step) {
      if (!group.status.ok()) return;
      lock.unlock();
      absl::Status status = Attempt(*group.jobs[task.first].path, step);
      lock.lock();
      if (group.status.ok()) group.status = std::move(status);
    };
    const bool is_mapped = group.mapped_nbytes > 0;
    unlocked([&] { return is_mapped ? RunMapped(task, memory) : ReadAll(task, memory); });
    if (group.num_left == 1 && group.then != nullptr && !is_mapped) {
      unlocked([&] { return group.then(memory.scratch.data()); });
    }
    --group.num_left;
    --num_running_;
    if (group.num_left == 0 || num_running_ == 0) has_news_.notify_all();
  }
}

absl::Status RangeReader::RunMapped(const Task& task, Memory& memory) {
  const ReadGroup& group = *task.group;
  std::vector<ByteRange> touched;
  for (const ReadJob& job : group.jobs) touched.push_back({job.offset, job.offset + job.nbytes});
  const ByteRange range{touched.front().start, touched.back().stop};
  if (const auto window = LeasedWindow::Open(group.jobs.front().fd, range, touched)) {
    nbytes_read_.fetch_add(group.mapped_nbytes, std::memory_order_relaxed);
    return group.then(window->data());
  }
  if (absl::Status status = ReadAll(task, memory); !status.ok()) return status;
  return group.then(memory.scratch.data());
}

absl::Status RangeReader::ReadAll(const Task& task, Memory& memory) {
  const auto wanted = static_cast<std::size_t>(task.group->scratch_nbytes);
  if (memory.scratch.size() < wanted) memory.scratch.resize(wanted);
  for (std::size_t i = task.first; i < task.stop; ++i) {
    ReadJob job = task.group->jobs[i];
    if (job.to == nullptr) job.to = memory.scratch.data() + job.tag;
    if (absl::Status status = Read(job, memory.bounce); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RangeReader::Read(const ReadJob& job, std::vector<std::byte>& bounce) {
  const int direct_fd = direct_ ? DirectFd(job) : -1;
  absl::Status status;
  if (direct_fd >= 0) {
    status = ReadDirect(direct_fd, job, bounce);
  } else {
    status = ReadFully(job.fd, job.offset, job.nbytes, job.to);
    nbytes_read_.fetch_add(job.nbytes, std::memory_order_relaxed);
  }
  if (status.ok()) return status;
  return Prefixed(absl::StrCat("`", *job.path, "` "), status);
}

int RangeReader::DirectFd(const ReadJob& job) {
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = direct_fds_.emplace(job.fd, -1);
  if (is_new) {
    // Not by its name, which may be another file's by now.
    const std::string same = absl::StrCat("/proc/self/fd/", job.fd);
    found->second = open(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  }
  return found->second;
}

absl::Status RangeReader::ReadDirect(int fd, const ReadJob& job, std::vector<std::byte>& bounce) {
  const Index start = RoundDown(job.offset);
  const Index stop = RoundUp(job.offset + job.nbytes);
  const auto room = static_cast<std::size_t>(stop - start + kDirectUnit);
  if (bounce.size() < room) bounce.resize(room);
  const auto address = reinterpret_cast<std::uintptr_t>(bounce.data());
  std::byte* aligned =
      bounce.data() + (kDirectUnit - static_cast<Index>(address % kDirectUnit)) % kDirectUnit;
  Index done = 0;
  const Index needed = job.offset + job.nbytes - start;
  while (done < needed) {
    const ssize_t got =
        pread(fd, aligned + done, static_cast<std::size_t>(stop - start - done), start + done);
    if (got < 0 && errno == EINTR) continue;
    // The end of the file, or a file system that takes no such read: the plain way says which.
    if (got <= 0 || (got % kDirectUnit != 0 && done + got < needed)) break;
    done += got;
  }
  nbytes_read_.fetch_add(stop - start, std::memory_order_relaxed);
  if (done < needed) return ReadFully(job.fd, job.offset, job.nbytes, job.to);
  std::memcpy(job.to, aligned + (job.offset - start), static_cast<std::size_t>(job.nbytes));
  return absl::OkStatus();
}

}  // namespace loadplan
