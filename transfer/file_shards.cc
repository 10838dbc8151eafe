#include "transfer/file_shards.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"
#include "geometry/strided_map.h"

namespace loadplan {
namespace {

constexpr Index kReadAheadNbytes = Index{64} << 20;

absl::Status CheckFileTensor(const FileTensor& tensor, const SourceTensor& declared) {
  if (tensor.shape == declared.shape && tensor.dtype == ToScalarType(declared.dtype)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "`", declared.name, "` lies in its file as ", tensor.file_dtype, " of shape [",
      absl::StrJoin(tensor.shape, ", "), "], expected ", std::string(declared.dtype.name), " [",
      absl::StrJoin(declared.shape, ", "), "]; plan again with what the files hold"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileShards>> FileShards::Open(std::span<const std::string> paths,
                                                             const LoadPlan& plan,
                                                             bool skips_undeclared) {
  absl::StatusOr<CheckpointFiles> files = CheckpointFiles::Open(paths);
  if (!files.ok()) return files.status();
  std::unique_ptr<FileShards> shards(new FileShards(*std::move(files)));
  const std::vector<FileTensor>& tensors = shards->files_.tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const FileTensor& tensor = tensors[i];
    shards->tensor_of_.emplace(tensor.name, static_cast<std::int32_t>(i));
    if (const auto entry = plan.Find(tensor.name)) {
      const SourceTensor& declared = plan.sources()[static_cast<std::size_t>(*entry)];
      if (absl::Status status = CheckFileTensor(tensor, declared); !status.ok()) return status;
    } else if (!skips_undeclared) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`", shards->files_.path(tensor.file), "` holds `", tensor.name,
          "` which was not declared when the plan was made; plan again with the metadata of these "
          "files, or leave such names alone with undeclared=\"skip\""));
    }
  }
  for (std::size_t entry = 0; entry < plan.sources().size(); ++entry) {
    const std::string& name = plan.sources()[entry].name;
    if (plan.entries()[entry].kind == EntryKind::kUnneeded) continue;
    if (shards->tensor_of_.contains(name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "` is needed and is in none of the files"));
  }
  return shards;
}

void FileShards::Assign(const GeometryTable& table, const Schedule& schedule,
                        std::span<const Message> messages, std::int32_t rank) {
  const auto& names = *table.names();
  for (const Message& message : messages) {
    if (message.sender != rank) continue;
    for (const MessagePart& part : message.parts) {
      const std::string& name = schedule.names()[static_cast<std::size_t>(part.name)];
      const Box& box = schedule.ChunkOf(part).box;
      if (std::size_t* share = FindShare(name, box)) {
        ++shares_[*share].num_uses;
        continue;
      }
      const auto at = std::ranges::lower_bound(names, name) - names.begin();
      const TensorGeometry& geometry = table.geometries()[static_cast<std::size_t>(
          table.geometry_of()[static_cast<std::size_t>(at)])];
      for (const ShardPiece& piece : geometry.pieces) {
        if (piece.rank != rank || Intersect(piece.box, box) != box) continue;
        shares_of_[name].push_back(shares_.size());
        shares_.push_back({.box = piece.box,
                           .tensor = tensor_of_[name],
                           .itemsize = geometry.dtype.itemsize,
                           .num_uses = 1});
        break;
      }
    }
  }
}

std::size_t* FileShards::FindShare(std::string_view name, const Box& box) {
  const auto found = shares_of_.find(std::string(name));
  if (found == shares_of_.end()) return nullptr;
  for (std::size_t& index : found->second) {
    if (Intersect(shares_[index].box, box) == box) return &index;
  }
  return nullptr;
}

void FileShards::Submit(Share& share) {
  const FileTensor& tensor = files_.tensors()[static_cast<std::size_t>(share.tensor)];
  const StridedLayout in_file = LayoutOfBox(share.box, tensor.shape, share.itemsize);
  share.bytes = NewBytes(in_file.nbytes(), at::kCPU);
  auto* to = static_cast<std::byte*>(share.bytes.mutable_data_ptr());
  const StridedLayout packed = *StridedLayout::Contiguous(0, in_file.shape(), share.itemsize);
  const StridedMap map = *StridedMap::Create(packed, in_file);
  std::vector<ReadJob> jobs;
  ForEachRun(map, [&](Index to_offset, Index from_offset, Index nbytes) {
    jobs.push_back({.fd = files_.fd(tensor.file),
                    .path = &files_.path(tensor.file),
                    .offset = tensor.offset + from_offset,
                    .nbytes = nbytes,
                    .to = to + to_offset});
  });
  share.group = reader_.Submit(jobs);
  ahead_nbytes_ += in_file.nbytes();
}

absl::StatusOr<LocalBytes> FileShards::Find(std::string_view name, std::int32_t rank,
                                            const Box& box) {
  const std::size_t* index = FindShare(name, box);
  if (index == nullptr) {
    return absl::InternalError(
        absl::StrCat("rank ", rank, " reads no ", ToString(box), " of `", std::string(name), "`"));
  }
  Share& share = shares_[*index];
  if (share.group == nullptr) Submit(share);
  for (next_ahead_ = std::max(next_ahead_, *index + 1);
       next_ahead_ < shares_.size() && ahead_nbytes_ < kReadAheadNbytes; ++next_ahead_) {
    if (shares_[next_ahead_].group == nullptr) Submit(shares_[next_ahead_]);
  }
  while (!reader_.WaitFor(*share.group, 1.0)) {
  }
  const FileTensor& tensor = files_.tensors()[static_cast<std::size_t>(share.tensor)];
  absl::Status status = reader_.StatusOf(*share.group);
  if (status.ok()) status = files_.CheckUnchanged(tensor.file);
  if (!status.ok()) return status;
  // Its place in the packed share.
  absl::InlinedVector<Interval, 4> inside;
  for (int d = 0; d < box.rank(); ++d) {
    const Index start = share.box[d].start;
    inside.push_back({box[d].start - start, box[d].stop - start});
  }
  LocalBytes bytes{LayoutOfBox(Box(std::move(inside)), share.box.shape(), share.itemsize),
                   ByteSide::OfStorage(share.bytes)};
  if (--share.num_uses == 0) {
    ahead_nbytes_ -= static_cast<Index>(share.bytes.nbytes());
    share.bytes = at::Tensor();
  }
  return bytes;
}

}  // namespace loadplan
