#include "plan/records.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace loadplan {
namespace {

bool IsStorage(const RecordLog& log, StorageId id) {
  return id >= 0 && static_cast<size_t>(id) < log.storages.size();
}

bool IsInside(const ByteRange& span, const RecordLog& log, StorageId storage) {
  return span.empty() ||
         (span.start >= 0 && span.stop <= log.storages[static_cast<size_t>(storage)].nbytes);
}

absl::Status ValidateCopy(const RecordLog& log, size_t time) {
  const CopyRecord& copy = log.copies[time];
  const auto error = [time](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("copy record ", time, " ", what));
  };
  if (!IsStorage(log, copy.to) || !IsStorage(log, copy.from)) {
    return error("names a storage that is not in the log");
  }
  if ((copy.to_dtype != copy.from_dtype) != copy.map.is_cast()) {
    return error(absl::StrCat("goes from ", std::string(copy.from_dtype.name), " to ",
                              std::string(copy.to_dtype.name), " and is ",
                              copy.map.is_cast() ? "a cast" : "no cast"));
  }
  if (copy.map.empty()) return absl::OkStatus();
  if (!IsInside(copy.map.ToSpan(), log, copy.to)) {
    return error(absl::StrCat("writes outside storage ", copy.to));
  }
  if (!IsInside(copy.map.FromSpan(), log, copy.from)) {
    return error(absl::StrCat("reads outside storage ", copy.from));
  }
  if (log.storages[static_cast<size_t>(copy.to)].kind == StorageKind::kValue) {
    return error(absl::StrCat("writes into storage ", copy.to, ", an operator's output"));
  }
  return absl::OkStatus();
}

absl::Status ValidateReads(const RecordLog& log, const std::vector<ReadRecord>& inputs, Index time,
                           const std::string& op) {
  if (time < 0 || time > static_cast<Index>(log.copies.size())) {
    return absl::InvalidArgumentError(absl::StrCat("`", op, "` has no place among the copies"));
  }
  for (const ReadRecord& input : inputs) {
    if (!IsStorage(log, input.storage) || !IsInside(input.layout.Span(), log, input.storage)) {
      return absl::InvalidArgumentError(
          absl::StrCat("`", op, "` reads outside storage ", input.storage));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLog(const RecordLog& log) {
  for (size_t s = 0; s < log.storages.size(); ++s) {
    const StorageRecord& storage = log.storages[s];
    if (storage.kind == StorageKind::kValue &&
        (storage.ref < 0 || static_cast<size_t>(storage.ref) >= log.nodes.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("storage ", s, " is an output of a node that is not in the log"));
    }
  }
  for (size_t time = 0; time < log.copies.size(); ++time) {
    if (absl::Status status = ValidateCopy(log, time); !status.ok()) return status;
  }
  for (const NodeRecord& node : log.nodes) {
    if (absl::Status status = ValidateReads(log, node.inputs, node.time, node.op); !status.ok()) {
      return status;
    }
  }
  for (const RefusalRecord& refusal : log.refusals) {
    if (absl::Status status = ValidateReads(log, refusal.inputs, refusal.time, refusal.op);
        !status.ok()) {
      return status;
    }
  }
  for (const AnsweredRead& answered : log.answered) {
    absl::Status status = ValidateReads(log, {answered.read}, answered.time, "answered read");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace loadplan
