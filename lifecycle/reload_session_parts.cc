// The calls of ReloadSession for names that arrive in parts; see Note [Parts].
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lifecycle/annotate.h"
#include "lifecycle/arrival.h"
#include "lifecycle/reload_session.h"

namespace loadplan {

absl::Status ReloadSession::BeginParts(std::string_view name, at::IntArrayRef shape,
                                       at::ScalarType dtype) {
  return Guarded([&]() -> absl::Status {
    absl::Status status = CheckLocked(SessionEvent::kLoad);
    if (!status.ok()) return status;
    if (plan_ == nullptr) return absl::InternalError("BeginParts before Begin");
    const absl::StatusOr<std::int32_t> entry = FindArriving(name);
    if (!entry.ok()) return Fail(entry.status());
    const SourceTensor& source = plan_->plan().sources()[static_cast<std::size_t>(*entry)];
    if (status = CheckDeclaredAs(source, shape, dtype); !status.ok()) return Fail(status);
    OpenParts parts;
    if (KindOf(*entry) == EntryKind::kFallback) {
      const auto options = at::TensorOptions().dtype(dtype).device(collection_->device());
      status = Attempt(absl::StrCat("`", std::string(name), "` could not be kept"),
                       [&] { parts.whole = at::empty(shape, options); });
      if (!status.ok()) return Fail(status);
      parts.arrival = collection_->NextArrival();
    }
    open_.emplace(*entry, std::move(parts));
    return absl::OkStatus();
  });
}

absl::StatusOr<std::int32_t> ReloadSession::OpenEntry(std::string_view name) {
  absl::Status status = CheckLocked(SessionEvent::kLoad);
  if (!status.ok()) return status;
  const std::optional<std::int32_t> entry =
      plan_ == nullptr ? std::nullopt : plan_->plan().Find(name);
  if (!entry.has_value() || !open_.contains(*entry)) {
    return Fail(absl::InternalError(
        absl::StrCat("a part of `", std::string(name), "` came before BeginParts")));
  }
  return *entry;
}

absl::Status ReloadSession::EnsureWritable() {
  if (absl::Status status = EnsureBegun(); !status.ok()) return Fail(status);
  return absl::OkStatus();
}

absl::Status ReloadSession::FailInPart(const absl::Status& status, std::int32_t entry) {
  return Fail(Prefixed(absl::StrCat("`", NameOf(entry), "` in parts: "), status));
}

absl::Status ReloadSession::DeliverPart(std::string_view name, const StridedMap& held,
                                        const ByteSide& from) {
  return Guarded([&]() -> absl::Status {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    const c10::NoGradGuard no_grad;
    absl::Status status;
    if (KindOf(*entry) == EntryKind::kFallback) {
      OpenParts& parts = open_[*entry];
      status = parts.held.Add(held.ToLayout(), static_cast<Index>(parts.whole.nbytes()));
      if (status.ok()) status = executor_->BeforeRead(from);
      if (status.ok()) status = CopyMapped(held, {}, ByteSide::OfStorage(parts.whole), from);
      if (status.ok()) parts.nbytes += held.nbytes();
    } else {
      if (status = EnsureWritable(); !status.ok()) return status;
      status = Attempt([&] { return executor_->DeliverPart(*entry, held, from); });
    }
    return status.ok() ? Launch() : FailInPart(status, *entry);
  });
}

absl::StatusOr<std::optional<ByteSide>> ReloadSession::InPlace(std::string_view name,
                                                               ByteRange bytes) {
  return Guarded([&]() -> absl::StatusOr<std::optional<ByteSide>> {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    if (KindOf(*entry) == EntryKind::kFallback) {
      ByteSide place = ByteSide::OfStorage(open_[*entry].whole);
      place.byte_offset = bytes.start;
      return std::optional(std::move(place));
    }
    // A thread or a peer that is late could write there after the old bytes were put back.
    if (undo_ != nullptr) return std::nullopt;
    if (absl::Status status = EnsureWritable(); !status.ok()) return status;
    return executor_->InPlace(*entry, bytes);
  });
}

absl::Status ReloadSession::DeliveredInPlace(std::string_view name, ByteRange bytes) {
  return Guarded([&]() -> absl::Status {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    absl::Status status;
    if (KindOf(*entry) == EntryKind::kFallback) {
      OpenParts& parts = open_[*entry];
      const StridedLayout layout = StridedLayout::Unchecked(bytes.start, {}, {}, bytes.nbytes());
      status = parts.held.Add(layout, static_cast<Index>(parts.whole.nbytes()));
      if (status.ok()) parts.nbytes += bytes.nbytes();
    } else {
      status = executor_->DeliveredInPlace(*entry, bytes);
    }
    return status.ok() ? status : FailInPart(status, *entry);
  });
}

bool ReloadSession::HasPlaces(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const std::optional<std::int32_t> entry =
      plan_ == nullptr ? std::nullopt : plan_->plan().Find(name);
  if (!entry.has_value()) return false;
  if (KindOf(*entry) == EntryKind::kFallback) return true;
  return undo_ == nullptr && executor_ != nullptr && executor_->HasPlaces(*entry);
}

absl::StatusOr<std::optional<PlacedPart>> ReloadSession::PlacesOf(std::string_view name,
                                                                  const StridedMap& held) {
  return Guarded([&]() -> absl::StatusOr<std::optional<PlacedPart>> {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    if (KindOf(*entry) == EntryKind::kFallback) {
      const ByteSide whole = ByteSide::OfStorage(open_[*entry].whole);
      if (!whole.tensor.is_cpu()) return std::nullopt;
      if (absl::Status status = CheckWrites(held, whole); !status.ok()) {
        return FailInPart(status, *entry);
      }
      return PlacedPart{{{Coalesce(held), MutableAddress(whole), whole.tensor}}, held.nbytes(), 0};
    }
    // See InPlace.
    if (undo_ != nullptr) return std::nullopt;
    if (absl::Status status = EnsureWritable(); !status.ok()) return status;
    absl::StatusOr<std::optional<PlacedPart>> placed = executor_->PlacesOf(*entry, held);
    if (!placed.ok()) return FailInPart(placed.status(), *entry);
    return placed;
  });
}

absl::Status ReloadSession::DeliveredPart(std::string_view name, const StridedMap& held,
                                          const PlacedPart& placed) {
  return Guarded([&]() -> absl::Status {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    absl::Status status;
    if (KindOf(*entry) == EntryKind::kFallback) {
      OpenParts& parts = open_[*entry];
      status = parts.held.Add(held.ToLayout(), static_cast<Index>(parts.whole.nbytes()));
      if (status.ok()) parts.nbytes += held.nbytes();
    } else {
      status = executor_->DeliveredPart(*entry, held, placed);
    }
    return status.ok() ? status : FailInPart(status, *entry);
  });
}

absl::Status ReloadSession::CompleteParts(std::string_view name) {
  return Guarded([&]() -> absl::Status {
    const absl::StatusOr<std::int32_t> entry = OpenEntry(name);
    if (!entry.ok()) return entry.status();
    const c10::NoGradGuard no_grad;
    OpenParts parts = std::move(open_[*entry]);
    if (KindOf(*entry) == EntryKind::kFallback) {
      const auto nbytes = static_cast<Index>(parts.whole.nbytes());
      if (parts.nbytes != nbytes) {
        return Fail(absl::FailedPreconditionError(absl::StrFormat(
            "`%s` is not complete: %d of its %d bytes came; it goes through the loader whole",
            NameOf(*entry), parts.nbytes, nbytes)));
      }
      collection_->Give(*entry, std::move(parts.whole), parts.arrival);
      call_nbytes_ += nbytes;
    } else {
      absl::Status status = EnsureWritable();
      if (!status.ok()) return status;
      if (status = executor_->Complete(*entry); !status.ok()) return Fail(status);
    }
    open_.erase(*entry);
    Land(*entry);
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::CheckArriving(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  if (absl::Status status = CheckLocked(SessionEvent::kLoad); !status.ok()) {
    return status;
  }
  if (plan_ == nullptr) return absl::InternalError("CheckArriving before Begin");
  return FindArriving(name).status();
}

}  // namespace loadplan
