#include "plan/load_plan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/landings.h"
#include "plan/report.h"

namespace loadplan {
namespace {

// Boxes of one name beyond which its bounding box is read instead.
constexpr Index kMaxBoxes = 1 << 14;

DenseTensor DenseOf(const SourceTensor& source) { return {source.shape, source.dtype.itemsize}; }

Box BoundingBoxOf(const std::vector<Box>& boxes) {
  absl::InlinedVector<Interval, 4> hull = boxes.front().intervals();
  for (const Box& box : boxes) {
    for (size_t d = 0; d < hull.size(); ++d) {
      hull[d].start = std::min(hull[d].start, box.intervals()[d].start);
      hull[d].stop = std::max(hull[d].stop, box.intervals()[d].stop);
    }
  }
  return Box(std::move(hull));
}

// Whether `region` can be written as a strided tensor of items of `itemsize`.
bool IsInItems(const StridedLayout& region, Index itemsize) {
  if (region.itemsize() != itemsize || region.byte_offset() % itemsize != 0) return false;
  for (size_t d = 0; d < region.shape().size(); ++d) {
    if (region.shape()[d] > 1 && region.byte_strides()[d] % itemsize != 0) return false;
  }
  return true;
}

}  // namespace

Index SourceTensor::nbytes() const {
  Index nbytes = dtype.itemsize;
  for (const Index extent : shape) nbytes *= extent;
  return nbytes;
}

std::string_view ToString(EntryKind kind) {
  switch (kind) {
    case EntryKind::kDirect:
      return "direct";
    case EntryKind::kDerived:
      return "derived";
    case EntryKind::kFallback:
      return "fallback";
    case EntryKind::kUnneeded:
      return "unneeded";
  }
  return "unknown";
}

std::string CastText(const std::vector<CastStep>& casts) {
  std::string text;
  for (const CastStep& step : casts) {
    absl::StrAppend(&text, text.empty() ? "cast " : " -> ", std::string(step.dtype.name));
  }
  return text;
}

std::string ToString(const WriteItem& item) {
  static constexpr std::array kOrigins = {"checkpoint", "constant", "live storage", "program"};
  std::string text =
      absl::StrCat(kOrigins[static_cast<size_t>(item.origin.kind)], " ", item.origin.index);
  if (item.origin.output != 0) absl::StrAppend(&text, " output ", item.origin.output);
  absl::StrAppend(&text, " -> ", item.target < 0 ? "input" : absl::StrCat("storage ", item.target),
                  ": ", ToString(item.map));
  if (!item.casts.empty()) absl::StrAppend(&text, ", ", CastText(item.casts));
  return text;
}

std::ostream& operator<<(std::ostream& stream, const WriteItem& item) {
  return stream << ToString(item);
}

bool LoadPlan::AllFallBack() const {
  return !entries_.empty() && std::ranges::all_of(entries_, [](const PlanEntry& entry) {
    return entry.kind == EntryKind::kFallback;
  });
}

std::optional<std::int32_t> LoadPlan::Find(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

std::span<const WriteItem> LoadPlan::writes_of(std::int32_t entry) const {
  const PlanEntry& e = entries_[static_cast<size_t>(entry)];
  return writes().subspan(e.first_write, e.num_writes);
}

bool LoadPlan::has_fallbacks() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const PlanEntry& e) { return e.kind == EntryKind::kFallback; });
}

void LoadPlan::ForEachRead(std::int32_t entry,
                           const std::function<void(const StridedMap&)>& f) const {
  for (const WriteItem& item : writes_of(entry)) f(item.map);
  auto read =
      std::lower_bound(program_reads_.begin(), program_reads_.end(), entry,
                       [](const ProgramRead& a, std::int32_t wanted) { return a.entry < wanted; });
  for (; read != program_reads_.end() && read->entry == entry; ++read) {
    const Program& program = programs_[static_cast<size_t>(read->program)];
    const ProgramInput& input = program.inputs[static_cast<size_t>(read->input)];
    f(input.pieces[static_cast<size_t>(read->piece)].map);
  }
}

std::vector<Box> LoadPlan::Reads(std::int32_t entry) const {
  const SourceTensor& source = sources_[static_cast<size_t>(entry)];
  const EntryKind kind = entries_[static_cast<size_t>(entry)].kind;
  if (kind == EntryKind::kUnneeded || source.nbytes() == 0) return {};
  if (kind == EntryKind::kFallback) return {Box::Whole(source.shape)};
  const DenseTensor base = DenseOf(source);
  std::vector<Box> boxes;
  ForEachRead(entry, [&](const StridedMap& map) {
    const StridedLayout layout = FromLayout(map);
    if (std::optional<std::vector<Box>> more = BoxesOf(layout, base, kMaxBoxes)) {
      std::move(more->begin(), more->end(), std::back_inserter(boxes));
    } else if (std::optional<Box> box = loadplan::BoundingBoxOf(layout, base)) {
      boxes.push_back(*std::move(box));
    }
  });
  if (boxes.size() < 2) return boxes;
  if (std::optional<std::vector<Box>> joined = UnionOf(boxes, kMaxBoxes)) {
    return *std::move(joined);
  }
  return {BoundingBoxOf(boxes)};
}

Index LoadPlan::ReadNbytes(std::int32_t entry) const {
  Index elements = 0;
  for (const Box& box : Reads(entry)) elements += box.num_elements();
  return elements * sources_[static_cast<size_t>(entry)].dtype.itemsize;
}

std::optional<std::vector<Box>> LoadPlan::GetBoxes(std::int32_t entry) const {
  if (entries_[static_cast<size_t>(entry)].kind == EntryKind::kUnneeded) return std::nullopt;
  const std::optional<std::vector<Dest>> dests = GetDest(entry);
  if (!dests) return std::vector<Box>{Box::Whole(sources_[static_cast<size_t>(entry)].shape)};
  std::vector<Box> boxes;
  for (const Dest& dest : *dests) {
    // One box may go to several places; it is sent once.
    if (std::find(boxes.begin(), boxes.end(), dest.box) == boxes.end()) boxes.push_back(dest.box);
  }
  return boxes;
}

std::optional<std::vector<LoadPlan::Dest>> LoadPlan::GetDest(std::int32_t entry) const {
  std::vector<Dest> dests;
  const EntryKind kind = entries_[static_cast<size_t>(entry)].kind;
  if (kind == EntryKind::kUnneeded) return dests;
  if (kind != EntryKind::kDirect) return std::nullopt;
  const SourceTensor& source = sources_[static_cast<size_t>(entry)];
  for (const WriteItem& item : writes_of(entry)) {
    std::optional<std::vector<BoxRegion>> regions = BoxRegionsOf(item.map, DenseOf(source));
    if (!regions) return std::nullopt;
    for (BoxRegion& region : *regions) {
      if (!IsInItems(region.region, source.dtype.itemsize)) return std::nullopt;
      // An engine may write there before the session has saved those bytes.
      if (MeetsLiveRead(item.target, region.region.Span())) return std::nullopt;
      dests.push_back({std::move(region.box), item.target, std::move(region.region)});
    }
  }
  return dests;
}

void LoadPlan::IndexProgramReads() {
  for (size_t p = 0; p < programs_.size(); ++p) {
    const Program& program = programs_[p];
    for (size_t i = 0; i < program.inputs.size(); ++i) {
      for (size_t k = 0; k < program.inputs[i].pieces.size(); ++k) {
        const Origin& origin = program.inputs[i].pieces[k].origin;
        if (origin.kind != OriginKind::kCheckpoint) continue;
        program_reads_.push_back({origin.index, static_cast<std::int32_t>(p),
                                  static_cast<std::int32_t>(i), static_cast<std::int32_t>(k)});
      }
    }
  }
  std::stable_sort(program_reads_.begin(), program_reads_.end(),
                   [](const ProgramRead& a, const ProgramRead& b) { return a.entry < b.entry; });
}

void LoadPlan::IndexLiveReads() {
  const auto add = [this](const WriteItem& item) {
    if (item.origin.kind == OriginKind::kLiveBefore)
      live_reads_[item.origin.index].push_back(item.map.FromSpan());
  };
  for (const WriteItem& item : live_copies_) add(item);
  for (const Program& program : programs_) {
    for (const ProgramInput& input : program.inputs) {
      for (const WriteItem& piece : input.pieces) add(piece);
    }
  }
}

bool LoadPlan::MeetsLiveRead(StorageId storage, ByteRange range) const {
  const auto found = live_reads_.find(storage);
  if (found == live_reads_.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [range](const ByteRange& read) {
    return read.start < range.stop && range.start < read.stop;
  });
}

std::string LoadPlan::Report() const { return MakeReport(*this); }

std::span<const TargetTensor> LoadPlan::declared_targets() const {
  const auto mirror = std::ranges::find(targets_, true, &TargetTensor::is_mirror);
  return {targets_.begin(), mirror};
}

}  // namespace loadplan
