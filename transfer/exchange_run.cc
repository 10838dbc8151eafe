#include "transfer/exchange_run.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "geometry/strided_map.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

// `nbytes` bytes of `side` as a tensor that c10d takes.
at::Tensor BytesAt(const ByteSide& side, Index byte_offset, Index nbytes) {
  return ViewOf(side, StridedLayout::Unchecked(byte_offset, {nbytes}, {1}, 1), at::kByte);
}

// The items of a box, packed from `byte_offset` on.
StridedLayout Packed(const Box& box, Index itemsize, Index byte_offset) {
  return *StridedLayout::Contiguous(byte_offset, box.shape(), itemsize);
}

MapSide SideOf(const StridedLayout& layout) {
  return {layout.byte_offset(), layout.byte_strides(), layout.itemsize()};
}

}  // namespace

ShardExchange::Run::Run(ShardExchange& exchange, ShardSource* shards, ReloadSession* session)
    : exchange_(exchange), shards_(shards) {
  if (session != nullptr) landing_.emplace(exchange.schedule_, exchange.num_parts_, *session);
}

absl::Status ShardExchange::Run::Move() {
  if (landing_.has_value()) {
    absl::Status status = landing_->Begin(exchange_.roles_.plan->plan(), exchange_.empty_entries_);
    if (!status.ok()) return status;
  }
  const std::vector<Message>& messages = exchange_.messages_;
  for (std::size_t next = 0; next < messages.size() || !in_flight_.empty();) {
    if (absl::Status status = PostBatch(next); !status.ok()) return status;
    if (absl::Status status = FinishOldest(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Posts messages from `next` on, as many as may be in flight.
absl::Status ShardExchange::Run::PostBatch(std::size_t& next) {
  const std::vector<Message>& messages = exchange_.messages_;
  const std::size_t posted_before = in_flight_.size();
  absl::Status status = exchange_.peers_.BeginBatch();
  for (; next < messages.size() && status.ok(); ++next) {
    const Message& message = messages[next];
    if (message.sender == message.receiver) {
      status = Attempt("copying", [&] { return CopyOwn(message); });
      continue;
    }
    if (!in_flight_.empty() &&
        in_flight_nbytes_ + message.nbytes > exchange_.options_.max_bytes_in_flight) {
      break;
    }
    status = Attempt("posting messages", [&] { return Post(message); });
  }
  const absl::StatusOr<WorkPtr> shared = exchange_.peers_.EndBatch();
  if (!status.ok()) return status;
  if (!shared.ok()) return shared.status();
  for (std::size_t i = posted_before; i < in_flight_.size(); ++i) {
    if (in_flight_[i].work == nullptr) in_flight_[i].work = *shared;
  }
  return absl::OkStatus();
}

absl::Status ShardExchange::Run::Post(const Message& message) {
  InFlight item;
  item.message = &message;
  item.sends = message.sender == exchange_.peers_.rank();
  const absl::StatusOr<at::Tensor> bytes = item.sends ? BytesToSend(item) : BytesToReceive(item);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<WorkPtr> work = item.sends ? exchange_.peers_.Send(*bytes, message.receiver)
                                            : exchange_.peers_.Receive(*bytes, message.sender);
  if (!work.ok()) return work.status();
  item.work = *std::move(work);
  in_flight_nbytes_ += message.nbytes;
  ++receipt_.num_messages;
  in_flight_.push_back(std::move(item));
  return absl::OkStatus();
}

// What lies in one piece where the group can read it is sent from there.
absl::StatusOr<at::Tensor> ShardExchange::Run::BytesToSend(InFlight& item) {
  const Message& message = *item.message;
  receipt_.sent_nbytes += message.nbytes;
  Index at = 0;
  for (const MessagePart& part : message.parts) {
    const absl::StatusOr<LocalBytes> bytes = Find(message, part);
    if (!bytes.ok()) return bytes.status();
    if (message.parts.size() == 1 && IsContiguous(bytes->layout) &&
        exchange_.peers_.Reaches(bytes->side.tensor)) {
      return BytesAt(bytes->side, bytes->layout.byte_offset(), message.nbytes);
    }
    if (!item.is_staged) {
      item.is_staged = true;
      item.staging = TakeStaging(message.nbytes);
    }
    const ScheduleChunk& chunk = exchange_.schedule_.ChunkOf(part);
    const StridedLayout packed = Packed(chunk.box, bytes->layout.itemsize(), at);
    const StridedMap map = StridedMap::Unchecked(packed.shape(), SideOf(packed),
                                                 SideOf(bytes->layout), /*is_cast=*/false);
    absl::Status status = CopyMapped(map, {}, ByteSide::OfStorage(item.staging), bytes->side);
    if (!status.ok()) return status;
    at += chunk.nbytes;
  }
  return BytesAt(ByteSide::OfStorage(item.staging), 0, message.nbytes);
}

absl::StatusOr<at::Tensor> ShardExchange::Run::BytesToReceive(InFlight& item) {
  const Message& message = *item.message;
  receipt_.received_nbytes += message.nbytes;
  if (message.parts.size() == 1 && message.nbytes >= exchange_.options_.schedule.solo_nbytes) {
    const absl::StatusOr<std::optional<ByteSide>> place = landing_->InPlace(message.parts.front());
    if (!place.ok()) return place.status();
    if (place->has_value() && exchange_.peers_.Reaches((*place)->tensor)) {
      receipt_.in_place_nbytes += message.nbytes;
      return BytesAt(**place, 0, message.nbytes);
    }
  }
  item.is_staged = true;
  item.staging = TakeStaging(message.nbytes);
  return BytesAt(ByteSide::OfStorage(item.staging), 0, message.nbytes);
}

absl::Status ShardExchange::Run::FinishOldest() {
  if (in_flight_.empty()) return absl::OkStatus();
  InFlight item = std::move(in_flight_.front());
  in_flight_.pop_front();
  const Message& message = *item.message;
  const std::int32_t peer = item.sends ? message.receiver : message.sender;
  if (absl::Status status = exchange_.peers_.Wait(item.work, peer); !status.ok()) {
    const std::string& name =
        exchange_.schedule_.names()[static_cast<std::size_t>(message.parts.front().name)];
    return Prefixed(
        absl::StrCat(item.sends ? absl::StrCat("sending to rank ", message.receiver)
                                : absl::StrCat("receiving from rank ", message.sender),
                     ", `", name, "`", message.parts.size() > 1 ? " and others" : "", ": "),
        status);
  }
  exchange_.peers_.NoteProgress();
  in_flight_nbytes_ -= message.nbytes;
  absl::Status status = item.sends ? absl::OkStatus() : LandMessage(item);
  if (item.is_staged) exchange_.staging_.push_back(std::move(item.staging));
  return status;
}

absl::Status ShardExchange::Run::LandMessage(const InFlight& item) {
  if (!item.is_staged) return landing_->LandedInPlace(item.message->parts.front());
  Index at = 0;
  for (const MessagePart& part : item.message->parts) {
    const ScheduleChunk& chunk = exchange_.schedule_.ChunkOf(part);
    const Index itemsize = exchange_.schedule_.ClassOf(part.name).dtype.itemsize;
    absl::Status status =
        landing_->Land(part, Packed(chunk.box, itemsize, at), ByteSide::OfStorage(item.staging));
    if (!status.ok()) return status;
    at += chunk.nbytes;
  }
  return absl::OkStatus();
}

absl::Status ShardExchange::Run::CopyOwn(const Message& message) {
  for (const MessagePart& part : message.parts) {
    const absl::StatusOr<LocalBytes> bytes = Find(message, part);
    if (!bytes.ok()) return bytes.status();
    absl::Status status = landing_->Land(part, bytes->layout, bytes->side);
    if (!status.ok()) return status;
  }
  receipt_.copied_nbytes += message.nbytes;
  return absl::OkStatus();
}

absl::StatusOr<LocalBytes> ShardExchange::Run::Find(const Message& message,
                                                    const MessagePart& part) const {
  const std::string& name = exchange_.schedule_.names()[static_cast<std::size_t>(part.name)];
  return shards_->Find(name, message.sender, exchange_.schedule_.ChunkOf(part).box);
}

at::Tensor ShardExchange::Run::TakeStaging(Index nbytes) {
  std::vector<at::Tensor>& free = exchange_.staging_;
  if (free.empty()) {
    return NewBytes(std::max(nbytes, exchange_.staging_nbytes_), exchange_.peers_.device());
  }
  at::Tensor staging = std::move(free.back());
  free.pop_back();
  return staging;
}

}  // namespace loadplan
