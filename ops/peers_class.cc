#include "ops/peers_class.h"

#include <array>
#include <utility>

#include "ops/raise.h"

namespace loadplan {
namespace {

std::chrono::milliseconds TimeoutOf(c10d::ProcessGroup& group, double timeout) {
  TORCH_CHECK_VALUE(timeout >= 0, "`timeout` has to be positive");
  if (timeout > 0) return Milliseconds(timeout);
  return group.getBackend(group.getDeviceTypes().front().type())->getBackendOptions()->timeout;
}

}  // namespace

PeersClass::PeersClass(c10::intrusive_ptr<c10d::ProcessGroup> group, double timeout)
    : peers_(group, TimeoutOf(*group, timeout)) {}

void PeersClass::agree(const std::string& problem, bool begins) {
  const std::array<std::int64_t, 1> header = {static_cast<std::int64_t>(GroupCall::kBroadcast)};
  std::string key;
  const auto headers = peers_.Consult(header, ProblemOf(problem), &key);
  peers_.EndWatch();
  Raise(headers.status());
  if (begins) Raise(peers_.BeginWatch(key));
}

absl::Status PeersClass::Failed(const absl::Status& status) {
  absl::Status first = peers_.Fail(status);
  peers_.EndWatch();
  return first;
}

void PeersClass::broadcast(const at::Tensor& tensor, std::int64_t root) {
  const absl::Status status = peers_.Broadcast(tensor, static_cast<std::int32_t>(root));
  if (!status.ok()) Raise(Failed(status));
}

void PeersClass::fail(const std::string& problem) { (void)Failed(ProblemOf(problem)); }

void DefinePeers(torch::Library& library) {
  library.class_<PeersClass>("Peers")
      .def(torch::init<c10::intrusive_ptr<c10d::ProcessGroup>, double>())
      .def("agree", &PeersClass::agree)
      .def("broadcast", &PeersClass::broadcast)
      .def("fail", &PeersClass::fail);
}

}  // namespace loadplan
