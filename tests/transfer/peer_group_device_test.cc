// Which tensors a group can send and receive as they lie. No message is sent.
#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "gtest/gtest.h"
#include "transfer/peer_group.h"

namespace loadplan {
namespace {

using BackendType = c10d::ProcessGroup::BackendType;

c10::intrusive_ptr<c10d::ProcessGroup> GroupOn(at::DeviceType type, BackendType backend) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  group->setBackend(type, backend, std::nullopt);
  return group;
}

// A tensor without memory, where there is no GPU.
at::Tensor On(at::Device device) {
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(at::kByte));
}

// NCCL posts no batch of messages on two devices, and would connect all ranks anew for the second.
TEST(PeerGroupDeviceTest, ReachesTheDeviceThatTheGroupIsBoundTo) {
  const auto group = GroupOn(at::kCUDA, BackendType::NCCL);
  group->setBoundDeviceId(at::Device(at::kCUDA, 1));
  const PeerGroup peers(group, std::chrono::milliseconds(1));
  EXPECT_EQ(peers.device(), at::Device(at::kCUDA, 1));
  EXPECT_TRUE(peers.Reaches(On(at::Device(at::kCUDA, 1))));
  EXPECT_FALSE(peers.Reaches(On(at::Device(at::kCUDA, 0))));
  EXPECT_FALSE(peers.Reaches(at::zeros({1})));
}

TEST(PeerGroupDeviceTest, ReachesTheHostWhereTheGroupDoes) {
  const PeerGroup peers(GroupOn(at::kCPU, BackendType::GLOO), std::chrono::milliseconds(1));
  EXPECT_TRUE(peers.Reaches(at::zeros({1})));
  EXPECT_FALSE(peers.Reaches(On(at::Device(at::kCUDA, 0))));
}

}  // namespace
}  // namespace loadplan
