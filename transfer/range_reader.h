// RangeReader: threads that read ranges of files into memory. It knows no plan and no tensor.
//
//   RangeReader reader({.threads = 4});
//   auto group = reader.Submit({{.fd = fd, .offset = 4096, .nbytes = 100, .to = buffer}});
//   while (!reader.WaitFor(*group, 0.1)) ShowProgress(reader.nbytes_read());
//   absl::Status status = reader.StatusOf(*group);
#ifndef LOADPLAN_TRANSFER_RANGE_READER_H_
#define LOADPLAN_TRANSFER_RANGE_READER_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "geometry/index.h"

namespace loadplan {

struct ReadJob {
  int fd = -1;
  const std::string* path = nullptr;  // for errors; outlives the reader's use of it
  Index offset = 0;
  Index nbytes = 0;
  std::byte* to = nullptr;  // null: to memory of the thread, at `tag`
  Index tag = 0;            // else the caller's own
};

// What is done with what has been read; `scratch`: the memory of the thread, if any was asked for,
// or the mapped file.
using AfterRead = std::function<absl::Status(const std::byte* scratch)>;

// Jobs that are waited for together.
struct ReadGroup {
  std::vector<ReadJob> jobs;
  AfterRead then;
  Index scratch_nbytes = 0;
  Index mapped_nbytes = 0;   // of SubmitMapped
  std::size_t num_left = 0;  // tasks
  absl::Status status;       // the first error
};

class RangeReader {
 public:
  struct Options {
    int num_threads = 4;
    // Past the page cache (O_DIRECT), where the file system can; through a buffer of the thread.
    bool direct = false;
    // Has the kernel fetch what was submitted before a thread asks for it: short reads of a disk
    // are then as many at a time as the disk takes, whatever the number of threads.
    bool advises = false;
  };

  explicit RangeReader(const Options& options);
  // Waits until no thread writes any more.
  ~RangeReader();

  // Jobs start in this order, each cut into reads of kMaxRead bytes; short ones that follow each
  // other are one thread's. An error drops those of its group that have not started. When all have
  // been read, `then` runs in the thread that read last, which has them in its cache. With
  // `scratch_nbytes`, memory for jobs without `to`, one thread reads them all.
  std::shared_ptr<ReadGroup> Submit(const std::vector<ReadJob>& jobs, AfterRead then = nullptr,
                                    Index scratch_nbytes = 0);
  // For `jobs` of one file, ascending, without `to`, whose tags count from where the first one
  // starts. Nothing is read where the file can be mapped, see Note [Mapped files]: `then` finds the
  // bytes at their tags all the same, and `nbytes` count as read.
  std::shared_ptr<ReadGroup> SubmitMapped(const std::vector<ReadJob>& jobs, AfterRead then,
                                          Index nbytes);
  // Whether the group is done, after at most `seconds`.
  bool WaitFor(const ReadGroup& group, double seconds);
  absl::Status StatusOf(const ReadGroup& group) const;
  // Drops what has not started and waits for what has.
  void Cancel();

  // Bytes asked of the files so far, what direct reads read around the ranges included.
  Index nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

  static constexpr Index kMaxRead = Index{8} << 20;

 private:
  // Jobs [first, stop) of a group.
  struct Task {
    std::shared_ptr<ReadGroup> group;
    std::size_t first = 0;
    std::size_t stop = 0;
  };

  // A thread's own memory.
  struct Memory {
    std::vector<std::byte> bounce;   // of direct reads
    std::vector<std::byte> scratch;  // of groups
  };

  std::shared_ptr<ReadGroup> SubmitGroup(std::shared_ptr<ReadGroup> group);
  void Work();
  // All of a group of SubmitMapped, and what comes then.
  absl::Status RunMapped(const Task& task, Memory& memory);
  absl::Status ReadAll(const Task& task, Memory& memory);
  absl::Status Read(const ReadJob& job, std::vector<std::byte>& bounce);
  absl::Status ReadDirect(int fd, const ReadJob& job, std::vector<std::byte>& bounce);
  // A second descriptor for direct reads; -1 where there can be none.
  int DirectFd(const ReadJob& job);

  const bool direct_;
  const bool advises_;
  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_news_;
  std::deque<Task> tasks_;
  int num_running_ = 0;
  bool stops_ = false;
  absl::flat_hash_map<int, int> direct_fds_;
  std::atomic<Index> nbytes_read_{0};
  std::vector<std::thread> threads_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_RANGE_READER_H_
