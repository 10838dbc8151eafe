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
#include "transfer/read_fully.h"

namespace loadplan {
namespace {

// Of memory, offsets and lengths: what every disk takes.
constexpr Index kDirectUnit = 4096;

Index RoundDown(Index value) { return value - value % kDirectUnit; }
Index RoundUp(Index value) { return RoundDown(value + kDirectUnit - 1); }

Index PastPage(const std::byte* address) {
  return static_cast<Index>(reinterpret_cast<std::uintptr_t>(address) % kDirectUnit);
}

// What one thread reads in one go.
constexpr Index kTaskNbytes = Index{2} << 20;
constexpr std::size_t kTaskJobs = 512;
// Of a mapped file, likewise.
constexpr Index kMappedNbytes = Index{8} << 20;
// Longer reads keep a disk busy by themselves, and the kernel would fetch their start only.
constexpr Index kMaxAdvised = Index{1} << 19;

std::vector<ReadJob> Cut(const std::vector<ReadJob>& jobs) {
  std::vector<ReadJob> parts;
  parts.reserve(jobs.size());
  for (ReadJob job : jobs) {
    while (job.nbytes > 0) {
      parts.push_back(job);
      ReadJob& part = parts.back();
      // The next one starts with a page.
      part.nbytes = std::min(job.nbytes, RangeReader::kMaxRead - job.offset % kDirectUnit);
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
    if (job.nbytes > kMaxAdvised || job.past_cache) continue;
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
  group->is_one_threads = scratch_nbytes > 0;
  return SubmitGroup(std::move(group));
}

std::shared_ptr<ReadGroup> RangeReader::SubmitMapped(const std::vector<ReadJob>& jobs,
                                                     AfterRead then, Index nbytes) {
  auto group = std::make_shared<ReadGroup>();
  group->jobs = jobs;
  group->then = std::move(then);
  group->mapped_nbytes = nbytes;
  group->step = ReadGroup::Step::kOpen;
  Index touched = 0;
  for (const ReadJob& job : jobs) touched += job.nbytes;
  group->is_one_threads = touched <= kMappedNbytes;
  return SubmitGroup(std::move(group));
}

std::shared_ptr<ReadGroup> RangeReader::SubmitGroup(std::shared_ptr<ReadGroup> group) {
  std::vector<Task> tasks = TasksOf(group);
  group->num_left = tasks.size();
  group->is_over = tasks.empty();
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(tasks, std::back_inserter(tasks_));
  }
  has_work_.notify_all();
  return group;
}

std::vector<RangeReader::Task> RangeReader::TasksOf(const std::shared_ptr<ReadGroup>& group) {
  std::vector<Task> tasks;
  if (group->step == ReadGroup::Step::kWrite) {
    for (std::size_t i = 0; i < group->then.num_writes; ++i) tasks.push_back({group, i, i + 1});
    return tasks;
  }
  if (group->jobs.empty()) return tasks;
  if (group->is_one_threads || group->step == ReadGroup::Step::kOpen) {
    return {{group, 0, group->jobs.size()}};
  }
  const Index most = group->window.has_value() ? kMappedNbytes : kTaskNbytes;
  Index nbytes = 0;
  for (std::size_t i = 0; i < group->jobs.size(); ++i) {
    nbytes += group->jobs[i].nbytes;
    if (tasks.empty() || nbytes > most || i - tasks.back().first == kTaskJobs) {
      tasks.push_back({group, i, i});
      nbytes = group->jobs[i].nbytes;
    }
    tasks.back().stop = i + 1;
  }
  return tasks;
}

bool RangeReader::WaitFor(const ReadGroup& group, double seconds) {
  std::unique_lock lock(mutex_);
  return has_news_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return group.is_over; });
}

absl::Status RangeReader::StatusOf(const ReadGroup& group) const {
  const std::lock_guard lock(mutex_);
  return group.status;
}

void RangeReader::Cancel() {
  std::unique_lock lock(mutex_);
  is_cancelled_ = true;
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
      memory.failed_at = -1;
      absl::Status status = Attempt(*group.jobs.front().path, step);
      lock.lock();
      if (status.ok() || !group.status.ok()) return;
      group.status = std::move(status);
      group.failed_at = memory.failed_at;
    };
    unlocked([&] { return Run(task, memory); });
    if (--group.num_left == 0) {
      std::vector<Task> next;
      unlocked([&] {
        absl::StatusOr<std::vector<Task>> found = NextStep(task.group);
        if (found.ok()) next = *std::move(found);
        return found.status();
      });
      if (is_cancelled_) next.clear();
      group.num_left = next.size();
      if (next.empty()) {
        lock.unlock();
        group.window.reset();
        lock.lock();
        group.is_over = true;
      } else {
        // Before other groups: what is there is written, and gives back its memory or its lease.
        tasks_.insert(tasks_.begin(), next.begin(), next.end());
        has_work_.notify_all();
      }
    }
    --num_running_;
    if (group.is_over || num_running_ == 0) has_news_.notify_all();
  }
}

absl::Status RangeReader::Run(const Task& task, Memory& memory) {
  ReadGroup& group = *task.group;
  const bool is_mapped = group.mapped_nbytes > 0;
  switch (group.step) {
    case ReadGroup::Step::kOpen: {
      if (absl::Status status = Open(group); !status.ok() || !group.is_one_threads) return status;
      if (absl::Status status = Bring(group, task.first, task.stop); !status.ok()) return status;
      break;
    }
    case ReadGroup::Step::kRead: {
      if (is_mapped) return Bring(group, task.first, task.stop);
      if (absl::Status status = ReadAll(task, memory); !status.ok() || !group.is_one_threads) {
        return status;
      }
      break;
    }
    case ReadGroup::Step::kWrite: {
      group.then.write(task.first, is_mapped ? group.window->data() : nullptr);
      return absl::OkStatus();
    }
  }
  // A group of one thread goes on with what it has in its cache.
  if (absl::Status status = Check(group); !status.ok()) return status;
  const std::byte* base = is_mapped ? group.window->data() : memory.scratch.data();
  for (std::size_t i = 0; i < group.then.num_writes; ++i) group.then.write(i, base);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RangeReader::Task>> RangeReader::NextStep(
    const std::shared_ptr<ReadGroup>& group) {
  if (group->is_one_threads || group->step == ReadGroup::Step::kWrite) return std::vector<Task>();
  if (group->step == ReadGroup::Step::kOpen) {
    group->step = ReadGroup::Step::kRead;
    return TasksOf(group);
  }
  if (absl::Status status = Check(*group); !status.ok()) return status;
  group->step = ReadGroup::Step::kWrite;
  return TasksOf(group);
}

absl::Status RangeReader::Open(ReadGroup& group) {
  const ReadJob& first = group.jobs.front();
  const ReadJob& last = group.jobs.back();
  auto window = LeasedWindow::Open(first.fd, {first.offset, last.offset + last.nbytes});
  if (!window.has_value()) return absl::UnavailableError("there is no lease of it");
  group.window.emplace(*std::move(window));
  return absl::OkStatus();
}

absl::Status RangeReader::Bring(const ReadGroup& group, std::size_t first, std::size_t stop) {
  std::vector<ByteRange> touched;
  for (std::size_t i = first; i < stop; ++i) {
    const ReadJob& job = group.jobs[i];
    touched.push_back({job.offset, job.offset + job.nbytes});
  }
  if (group.window->Bring(touched)) return absl::OkStatus();
  return absl::UnavailableError("a page of it cannot be had");
}

absl::Status RangeReader::Check(const ReadGroup& group) {
  if (group.window.has_value() && !group.window->IsQuiet()) {
    return absl::UnavailableError("somebody waits to change it");
  }
  if (group.then.check != nullptr) {
    if (absl::Status status = group.then.check(); !status.ok()) return status;
  }
  nbytes_read_.fetch_add(group.mapped_nbytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status RangeReader::ReadAll(const Task& task, Memory& memory) {
  const auto wanted = static_cast<std::size_t>(task.group->scratch_nbytes);
  if (memory.scratch.size() < wanted) memory.scratch.resize(wanted);
  for (std::size_t i = task.first; i < task.stop; ++i) {
    ReadJob job = task.group->jobs[i];
    if (job.to == nullptr) job.to = memory.scratch.data() + job.tag;
    if (absl::Status status = Read(job, memory); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RangeReader::Read(const ReadJob& job, Memory& memory) {
  const int direct_fd = direct_ || job.past_cache ? DirectFd(job) : -1;
  absl::Status status;
  if (direct_fd >= 0) {
    status = ReadDirect(direct_fd, job, memory);
  } else {
    status = ReadFully(job.fd, job.offset, job.nbytes, job.to, &memory.failed_at);
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

absl::Status RangeReader::ReadDirect(int fd, const ReadJob& job, Memory& memory) {
  const Index start = RoundDown(job.offset);
  const Index stop = RoundUp(job.offset + job.nbytes);
  const Index head = job.offset - start;
  std::byte* pages = job.to - head;
  const bool goes_straight = job.past_cache && PastPage(pages) == 0;
  if (!goes_straight) {
    const auto room = static_cast<std::size_t>(stop - start + kDirectUnit);
    if (memory.bounce.size() < room) memory.bounce.resize(room);
    pages = memory.bounce.data() + (kDirectUnit - PastPage(memory.bounce.data())) % kDirectUnit;
  }
  Index done = 0;
  const Index needed = head + job.nbytes;
  while (done < needed) {
    const ssize_t got =
        pread(fd, pages + done, static_cast<std::size_t>(stop - start - done), start + done);
    if (got < 0 && errno == EINTR) continue;
    // The end of the file, or a file system that takes no such read: the plain way says which.
    if (got <= 0 || (got % kDirectUnit != 0 && done + got < needed)) break;
    done += got;
  }
  nbytes_read_.fetch_add(stop - start, std::memory_order_relaxed);
  if (done < needed) return ReadFully(job.fd, job.offset, job.nbytes, job.to, &memory.failed_at);
  if (!goes_straight) {
    std::memcpy(job.to, pages + head, static_cast<std::size_t>(job.nbytes));
  }
  return absl::OkStatus();
}

}  // namespace loadplan
