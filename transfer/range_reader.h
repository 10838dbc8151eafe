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
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/index.h"
#include "transfer/leased_window.h"

namespace loadplan {

struct ReadJob {
  int fd = -1;
  const std::string* path = nullptr;  // for errors; outlives the reader's use of it
  Index offset = 0;
  Index nbytes = 0;
  std::byte* to = nullptr;  // null: to memory of the thread, at `tag`
  Index tag = 0;            // else the caller's own
  // Past the page cache, straight to `to`, which lies in its page as `offset` does in one of the
  // file: what is around it in the first and the last page is overwritten.
  bool past_cache = false;
};

// What is done with what has been read.
struct AfterRead {
  // Once, when all has been read, before anything is written.
  std::function<absl::Status()> check;
  // Each of [0, num_writes) once, in any thread. `base`: the memory of the thread that has read,
  // if any was asked for, or the mapped file.
  std::function<void(std::size_t write, const std::byte* base)> write;
  std::size_t num_writes = 0;
};

// Jobs that are waited for together.
struct ReadGroup {
  // What its tasks do now.
  enum class Step : std::uint8_t { kOpen, kRead, kWrite };

  std::vector<ReadJob> jobs;
  AfterRead then;
  Index scratch_nbytes = 0;
  Index mapped_nbytes = 0;             // of SubmitMapped
  std::optional<LeasedWindow> window;  // likewise
  bool is_one_threads = false;         // it does all steps in one task
  Step step = Step::kRead;
  std::size_t num_left = 0;  // tasks of this step
  bool is_over = false;
  absl::Status status;   // the first error
  Index failed_at = -1;  // the byte of the file that could not be read
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
  // been read, `then` runs; nothing of it does after an error. With `scratch_nbytes`, memory for
  // jobs without `to`, one thread reads them all, and goes on with what it has in its cache.
  std::shared_ptr<ReadGroup> Submit(const std::vector<ReadJob>& jobs, AfterRead then = {},
                                    Index scratch_nbytes = 0);
  // For `jobs` of one file, ascending, without `to`, whose tags count from where the first one
  // starts. Nothing is read: the file is mapped, all of the jobs under one lease, see Note [Mapped
  // files], and `then` finds the bytes at their tags. `nbytes` count as read. Unavailable, with
  // nothing written: the file cannot be mapped now, or some of it cannot be had; read instead.
  std::shared_ptr<ReadGroup> SubmitMapped(const std::vector<ReadJob>& jobs, AfterRead then,
                                          Index nbytes);
  // Whether the group is done, after at most `seconds`.
  bool WaitFor(const ReadGroup& group, double seconds);
  absl::Status StatusOf(const ReadGroup& group) const;
  // Drops what has not started and waits for what has. Nothing starts any more.
  void Cancel();

  // Bytes asked of the files so far, what direct reads read around the ranges included.
  Index nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

  static constexpr Index kMaxRead = Index{8} << 20;

 private:
  // Jobs [first, stop) of a group, or writes.
  struct Task {
    std::shared_ptr<ReadGroup> group;
    std::size_t first = 0;
    std::size_t stop = 0;
  };

  // A thread's own memory.
  struct Memory {
    std::vector<std::byte> bounce;   // of direct reads
    std::vector<std::byte> scratch;  // of groups
    Index failed_at = -1;            // of the last error
  };

  std::shared_ptr<ReadGroup> SubmitGroup(std::shared_ptr<ReadGroup> group);
  void Work();
  static std::vector<Task> TasksOf(const std::shared_ptr<ReadGroup>& group);
  absl::Status Run(const Task& task, Memory& memory);
  // Of a mapped group.
  static absl::Status Open(ReadGroup& group);
  static absl::Status Bring(const ReadGroup& group, std::size_t first, std::size_t stop);
  absl::Status Check(const ReadGroup& group);
  // What comes after the step that is done; none where that was the last one.
  absl::StatusOr<std::vector<Task>> NextStep(const std::shared_ptr<ReadGroup>& group);
  absl::Status ReadAll(const Task& task, Memory& memory);
  absl::Status Read(const ReadJob& job, Memory& memory);
  absl::Status ReadDirect(int fd, const ReadJob& job, Memory& memory);
  // A second descriptor for direct reads; -1 where there can be none.
  int DirectFd(const ReadJob& job);

  const bool direct_;
  const bool advises_;
  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_news_;
  std::deque<Task> tasks_;
  int num_running_ = 0;
  bool is_cancelled_ = false;
  bool stops_ = false;
  absl::flat_hash_map<int, int> direct_fds_;
  std::atomic<Index> nbytes_read_{0};
  std::vector<std::thread> threads_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_RANGE_READER_H_
