// PeersClass: what broadcasts of whole tensors need of a process group.
#ifndef LOADPLAN_OPS_PEERS_CLASS_H_
#define LOADPLAN_OPS_PEERS_CLASS_H_

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "transfer/peer_group.h"

namespace loadplan {

// Years at most: more than that overflows where it is added to a time.
inline std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, 1e8) * 1000));
}

// Empty, or why this rank cannot take part.
inline absl::Status ProblemOf(const std::string& text) {
  return text.empty() ? absl::OkStatus() : absl::FailedPreconditionError(text);
}

class PeersClass : public torch::CustomClassHolder {
 public:
  // Seconds to wait for a rank that gives no sign; 0: as long as the group waits.
  PeersClass(c10::intrusive_ptr<c10d::ProcessGroup> group, double timeout);
  // By all ranks: raises on each where one has a problem. Until the next call a failure of one ends
  // the waits of all, if `begins`.
  void agree(const std::string& problem, bool begins);
  // By all ranks: the bytes of `root`. What it raises on one it raises on all.
  void broadcast(const at::Tensor& tensor, std::int64_t root);
  // Between broadcasts: tells the others that this rank makes no more.
  void fail(const std::string& problem);

 private:
  absl::Status Failed(const absl::Status& status);

  PeerGroup peers_;
};

void DefinePeers(torch::Library& library);

}  // namespace loadplan

#endif  // LOADPLAN_OPS_PEERS_CLASS_H_
