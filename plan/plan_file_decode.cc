// The bytes of a plan file as a plan. See Note [Plan files] in plan/plan_file.h: every check here
// stands for something that the rest of the library takes for granted.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "plan/byte_codec.h"
#include "plan/plan_file.h"
#include "plan/plan_file_geometry.h"
#include "plan/plan_file_sections.h"

namespace loadplan {

class PlanFileDecoder {
 public:
  PlanFileDecoder(const SectionViews& sections, const DTypeLookup& dtype_of)
      : sections_(sections), dtype_of_(dtype_of) {}

  absl::StatusOr<PlanFile> Decode() {
    // In an order in which each section finds what it names.
    absl::Status status = Each({{Section::kAbout, &PlanFileDecoder::About},
                                {Section::kDTypes, &PlanFileDecoder::DTypes},
                                {Section::kStorages, &PlanFileDecoder::Storages},
                                {Section::kTargets, &PlanFileDecoder::Targets},
                                {Section::kSources, &PlanFileDecoder::Sources},
                                {Section::kConstants, &PlanFileDecoder::Constants},
                                {Section::kGeometry, &PlanFileDecoder::Geometry},
                                {Section::kEntries, &PlanFileDecoder::Entries},
                                {Section::kPrograms, &PlanFileDecoder::Programs},
                                {Section::kWrites, &PlanFileDecoder::Writes},
                                {Section::kFindings, &PlanFileDecoder::Findings}});
    if (!status.ok()) return status;
    plan_.IndexProgramReads();
    plan_.IndexLiveReads();
    return std::move(file_);
  }

 private:
  using Part = void (PlanFileDecoder::*)(ByteReader&);

  absl::Status Each(std::initializer_list<std::pair<Section, Part>> parts) {
    for (const auto& [section, part] : parts) {
      const auto s = static_cast<std::size_t>(section);
      const std::string what =
          absl::StrCat("section `", std::string(kSectionNames[s]), "` of the plan file");
      ByteReader in(sections_[s], what);
      (this->*part)(in);
      in.ExpectEnd();
      if (!in.ok()) return in.status();
    }
    return absl::OkStatus();
  }

  // Names are shown, compared and handed to host languages.
  static std::string Text(ByteReader& in) {
    const std::string_view text = in.String();
    if (!IsUtf8(text)) in.Fail("a text is no UTF-8");
    return std::string(text);
  }
  static double Seconds(ByteReader& in) {
    const double seconds = in.Double();
    if (!std::isfinite(seconds)) in.Fail("a number of seconds is not finite");
    return seconds;
  }
  static std::int32_t Id(ByteReader& in, std::size_t end, std::string_view what, Index least = 0) {
    const Index id = in.Signed();
    if (id < least || id >= static_cast<Index>(end)) {
      in.Fail(absl::StrCat(std::string(what), " ", id, " of ", end));
      return 0;
    }
    return static_cast<std::int32_t>(id);
  }
  static Index Nbytes(ByteReader& in) {
    const Index nbytes = in.Signed();
    if (nbytes < 0) in.Fail(absl::StrCat("a size of ", nbytes, " bytes"));
    return std::max(nbytes, Index{0});
  }

  DType TheDType(ByteReader& in) {
    const std::size_t id = in.Unsigned();
    if (id < dtypes_.size()) return dtypes_[id];
    in.Fail(absl::StrCat("dtype ", id, " of ", dtypes_.size()));
    return {};
  }
  // -1 and a failure where no target lies there.
  StorageId Storage(ByteReader& in) {
    const Index id = in.Signed();
    if (const auto found = storages_.find(id); found != storages_.end()) {
      return static_cast<StorageId>(id);
    }
    in.Fail(absl::StrCat("storage ", id, " is not among those of the targets"));
    return -1;
  }
  Index StorageNbytes(StorageId id) const {
    const auto found = storages_.find(id);
    return found == storages_.end() ? 0 : found->second;
  }
  // Of `limit` bytes.
  static StridedLayout Layout(ByteReader& in, Index limit) {
    absl::StatusOr<StridedLayout> layout = ReadLayout(in);
    if (!layout.ok()) {
      in.Fail(std::string(layout.status().message()));
      return {};
    }
    if (!layout->empty() && layout->Span().stop > limit) {
      in.Fail(absl::StrCat("`", ToString(*layout), "` does not lie in ", limit, " bytes"));
    }
    return *std::move(layout);
  }

  void About(ByteReader& in) {
    PlanFileInfo& info = extras_.info;
    for (std::string* const text : {&info.library_version, &info.torch_version, &info.processor,
                                    &info.tag, &info.placement}) {
      *text = Text(in);
    }
    for (std::size_t left = in.Count(1); left > 0 && in.ok(); --left) {
      info.rebound.push_back(Text(in));
    }
    info.plan_seconds = Seconds(in);
    plan_.trace_seconds = Seconds(in);
    plan_.build_seconds = Seconds(in);
    plan_.overlap_policy_ = static_cast<OverlapPolicy>(
        in.Bounded(static_cast<Index>(OverlapPolicy::kError), "the overlap policy"));
  }

  void DTypes(ByteReader& in) {
    for (std::size_t left = in.Count(2); left > 0 && in.ok(); --left) {
      const std::string name = Text(in);
      const Index itemsize = in.Bounded(127, "the size of a dtype");
      const std::optional<DType> dtype = in.ok() ? dtype_of_(name) : std::nullopt;
      if (!dtype.has_value() || dtype->itemsize != itemsize || itemsize < 1) {
        in.Fail(absl::StrCat("this torch has no dtype `", name, "` of ", itemsize, " bytes"));
        return;
      }
      dtypes_.push_back(*dtype);
    }
  }

  void Storages(ByteReader& in) {
    for (std::size_t left = in.Count(3); left > 0 && in.ok(); --left) {
      SavedStorage& storage = extras_.storages.emplace_back();
      storage.id = Id(in, std::numeric_limits<std::int32_t>::max(), "storage");
      storage.nbytes = Nbytes(in);
      storage.device = Text(in);
      if (!storages_.emplace(storage.id, storage.nbytes).second) {
        in.Fail(absl::StrCat("storage ", storage.id, " is there twice"));
      }
    }
  }

  void Targets(ByteReader& in) {
    absl::flat_hash_set<std::string> names;
    for (std::size_t left = in.Count(6); left > 0 && in.ok(); --left) {
      TargetTensor& target = plan_.targets_.emplace_back();
      target.name = Text(in);
      target.storage = Storage(in);
      target.layout = Layout(in, StorageNbytes(target.storage));
      target.dtype = TheDType(in);
      if (target.layout.itemsize() != target.dtype.itemsize) {
        in.Fail(
            absl::StrCat("target `", target.name, "` has items of another size than its dtype"));
      }
      if (!names.insert(target.name).second) {
        in.Fail(absl::StrCat("target `", target.name, "` is there twice"));
      }
    }
  }

  void Sources(ByteReader& in) {
    const std::size_t count = in.Count(4);
    plan_.sources_.reserve(count);
    for (std::size_t left = count; left > 0 && in.ok(); --left) {
      SourceTensor& source = plan_.sources_.emplace_back();
      source.name = Text(in);
      source.shape = ReadShape(in);
      source.dtype = TheDType(in);
      // Of the log, which is gone; -1: in none of it.
      source.storage = Id(in, std::numeric_limits<std::int32_t>::max(), "storage", -1);
      if (!NbytesOf(source.shape, source.dtype.itemsize).has_value()) {
        in.Fail(absl::StrCat("`", source.name, "` is larger than any tensor"));
      }
    }
    plan_.by_name_.reserve(plan_.sources_.size());
    for (std::size_t n = 0; n < plan_.sources_.size(); ++n) {
      const std::string& name = plan_.sources_[n].name;
      if (!plan_.by_name_.emplace(name, static_cast<std::int32_t>(n)).second) {
        return in.Fail(absl::StrCat("`", name, "` is declared twice"));
      }
    }
  }

  void Constants(ByteReader& in) {
    for (std::size_t left = in.Count(3); left > 0 && in.ok(); --left) {
      SavedConstant& constant = extras_.constants.emplace_back();
      constant.index = Id(in, std::numeric_limits<std::int32_t>::max(), "constant");
      constant.nbytes = Nbytes(in);
      constant.blob = in.String();
      if (!constants_.emplace(constant.index, constant.nbytes).second) {
        in.Fail(absl::StrCat("constant ", constant.index, " is there twice"));
      }
    }
  }

  void Geometry(ByteReader& in) {
    for (std::size_t left = in.Count(4); left > 0 && in.ok(); --left) {
      geometry_.push_back(MapRow::Read(in, dtypes_));
    }
  }

  void Entries(ByteReader& in) {
    std::vector<std::string> reasons;
    for (std::size_t left = in.Count(1); left > 0 && in.ok(); --left) reasons.push_back(Text(in));
    plan_.entries_.reserve(plan_.sources_.size());
    std::size_t first_write = 0;
    for (std::size_t n = 0; n < plan_.sources_.size() && in.ok(); ++n) {
      PlanEntry& entry = plan_.entries_.emplace_back();
      entry.kind = static_cast<EntryKind>(
          in.Bounded(static_cast<Index>(EntryKind::kUnneeded), "the kind of a name"));
      const std::size_t reason = in.Unsigned();
      if (reason < reasons.size()) {
        entry.reason = reasons[reason];
      } else {
        in.Fail(absl::StrCat("reason ", reason, " of ", reasons.size()));
      }
      // Each write takes at least four bytes of its section.
      const std::size_t most =
          sections_[static_cast<std::size_t>(Section::kWrites)].size() / 4 - first_write;
      entry.first_write = static_cast<std::uint32_t>(first_write);
      entry.num_writes = static_cast<std::uint32_t>(
          in.Bounded(static_cast<Index>(most), "the number of writes of a name"));
      first_write += entry.num_writes;
      const bool writes = entry.kind == EntryKind::kDirect || entry.kind == EntryKind::kDerived;
      if (entry.num_writes > 0 && !writes) {
        in.Fail(absl::StrCat("`", plan_.sources_[n].name, "` is ",
                             std::string(ToString(entry.kind)), " and writes all the same"));
      }
    }
    num_writes_ = first_write;
  }

  // Bytes that may be read from there; a failure where there is no such place. Programs may
  // read those before `num_programs`.
  Index Limit(ByteReader& in, const Origin& origin, std::size_t num_programs) {
    const auto no = [&](std::string_view what) {
      in.Fail(absl::StrCat("bytes come from ", std::string(what), " ", origin.index, " output ",
                           origin.output, ", which is not there"));
      return Index{0};
    };
    const auto index = static_cast<std::size_t>(std::max(origin.index, 0));
    switch (origin.kind) {
      case OriginKind::kCheckpoint:
        if (origin.index < 0 || index >= plan_.sources_.size()) return no("checkpoint tensor");
        return plan_.sources_[index].nbytes();
      case OriginKind::kConstant: {
        const auto found = constants_.find(origin.index);
        return found == constants_.end() ? no("constant") : found->second;
      }
      case OriginKind::kLiveBefore: {
        const auto found = storages_.find(origin.index);
        return found == storages_.end() ? no("storage") : found->second;
      }
      case OriginKind::kValue:
        break;
    }
    if (origin.index < 0 || index >= std::min(num_programs, extras_.programs.size())) {
      return no("program");
    }
    const std::vector<Index>& results = extras_.programs[index].result_nbytes;
    if (origin.output < 0 || static_cast<std::size_t>(origin.output) >= results.size()) {
      return no("program");
    }
    return results[static_cast<std::size_t>(origin.output)];
  }

  static Origin FromAnywhere(ByteReader& in) {
    Origin origin;
    origin.kind = static_cast<OriginKind>(
        in.Bounded(static_cast<Index>(OriginKind::kValue), "the kind of an origin"));
    origin.index = Id(in, std::numeric_limits<std::int32_t>::max(), "origin");
    origin.output = Id(in, std::numeric_limits<std::int32_t>::max(), "output");
    return origin;
  }

  void Map(ByteReader& in, Index to_limit, Index from_limit, WriteItem& item) {
    const std::size_t row = in.Unsigned();
    const Index to = in.Signed();
    const Index from = in.Signed();
    if (!in.ok()) return;
    if (row >= geometry_.size()) {
      return in.Fail(absl::StrCat("geometry ", row, " of ", geometry_.size()));
    }
    std::optional<StridedMap> map = geometry_[row].At(to, to_limit, from, from_limit);
    if (!map.has_value()) return in.Fail("a write reaches out of its storage");
    item.map = *std::move(map);
    item.casts = geometry_[row].casts();
  }

  void Programs(ByteReader& in) {
    absl::flat_hash_set<NodeId> nodes;
    for (std::size_t left = in.Count(6); left > 0 && in.ok(); --left) {
      Program program;
      program.node = Id(in, std::numeric_limits<std::int32_t>::max(), "node");
      if (!nodes.insert(program.node).second) in.Fail("an operator is there twice");
      program.op = Text(in);
      for (std::size_t names = in.Count(1); names > 0 && in.ok(); --names) {
        program.names.push_back(Id(in, plan_.sources_.size(), "name"));
      }
      for (std::size_t inputs = in.Count(5); inputs > 0 && in.ok(); --inputs) {
        ProgramInput& input = program.inputs.emplace_back();
        input.layout = Layout(in, std::numeric_limits<Index>::max());
        input.dtype = TheDType(in);
        if (input.layout.byte_offset() != 0 || input.layout.itemsize() != input.dtype.itemsize) {
          in.Fail(absl::StrCat("an input of `", program.op, "` is no buffer of its dtype"));
        }
        for (std::size_t pieces = in.Count(6); pieces > 0 && in.ok(); --pieces) {
          WriteItem& piece = input.pieces.emplace_back();
          piece.origin = FromAnywhere(in);
          const Index from_limit = Limit(in, piece.origin, plan_.programs_.size());
          Map(in, input.layout.Span().stop, from_limit, piece);
        }
      }
      SavedProgram saved;
      for (std::size_t results = in.Count(1); results > 0 && in.ok(); --results) {
        saved.result_nbytes.push_back(Nbytes(in));
      }
      saved.blob = in.String();
      CheckNames(in, program);
      plan_.programs_.push_back(std::move(program));
      extras_.programs.push_back(std::move(saved));
    }
  }

  // An operator runs when the last of its names is there: all that it needs must be among them.
  void CheckNames(ByteReader& in, const Program& program) const {
    const std::vector<std::int32_t>& names = program.names;
    if (std::adjacent_find(names.begin(), names.end(), std::greater_equal<>()) != names.end()) {
      return in.Fail(absl::StrCat("the names of `", program.op, "` are not in order"));
    }
    const auto lacks = [&](std::int32_t name) {
      return !std::binary_search(names.begin(), names.end(), name);
    };
    for (const ProgramInput& input : program.inputs) {
      for (const WriteItem& piece : input.pieces) {
        const Origin& origin = piece.origin;
        bool is_missing = origin.kind == OriginKind::kCheckpoint && lacks(origin.index);
        if (origin.kind == OriginKind::kValue &&
            static_cast<std::size_t>(origin.index) < plan_.programs_.size()) {
          const auto& needed = plan_.programs_[static_cast<std::size_t>(origin.index)].names;
          is_missing = !std::includes(names.begin(), names.end(), needed.begin(), needed.end());
        }
        if (is_missing) return in.Fail(absl::StrCat("`", program.op, "` lacks a name it needs"));
      }
    }
  }

  void Writes(ByteReader& in) {
    plan_.writes_.reserve(num_writes_);
    for (std::size_t n = 0; n < plan_.entries_.size() && in.ok(); ++n) {
      const PlanEntry& entry = plan_.entries_[n];
      const Index nbytes = plan_.sources_[n].nbytes();
      for (std::uint32_t left = entry.num_writes; left > 0 && in.ok(); --left) {
        WriteItem& item = plan_.writes_.emplace_back();
        item.origin = {OriginKind::kCheckpoint, static_cast<std::int32_t>(n), 0};
        item.target = Storage(in);
        Map(in, StorageNbytes(item.target), nbytes, item);
        if (entry.kind == EntryKind::kDirect && !item.casts.empty()) {
          in.Fail(absl::StrCat("`", plan_.sources_[n].name, "` is direct and cast"));
        }
      }
    }
    Nameless(in, OriginKind::kConstant, plan_.constants_);
    Nameless(in, OriginKind::kLiveBefore, plan_.live_copies_);
    Nameless(in, OriginKind::kValue, plan_.value_writes_);
  }

  void Nameless(ByteReader& in, OriginKind kind, std::vector<WriteItem>& items) {
    for (std::size_t left = in.Count(7); left > 0 && in.ok(); --left) {
      WriteItem& item = items.emplace_back();
      item.origin = FromAnywhere(in);
      item.target = Storage(in);
      if (item.origin.kind != kind) in.Fail("a write stands among those of another origin");
      const Index from_limit = Limit(in, item.origin, plan_.programs_.size());
      Map(in, StorageNbytes(item.target), from_limit, item);
    }
  }

  void Findings(ByteReader& in) {
    for (std::size_t left = in.Count(4); left > 0 && in.ok(); --left) {
      NameOverlap& overlap = plan_.overlaps_.emplace_back();
      overlap.first = Id(in, plan_.sources_.size(), "name");
      overlap.second = Id(in, plan_.sources_.size(), "name");
      overlap.storage = Storage(in);
      overlap.nbytes = Nbytes(in);
    }
    for (std::size_t left = in.Count(3); left > 0 && in.ok(); --left) {
      UncoveredTarget& target = plan_.uncovered_.emplace_back();
      target.target = Id(in, plan_.targets_.size(), "target");
      target.nbytes = Nbytes(in);
      target.total_nbytes = Nbytes(in);
    }
    for (std::size_t left = in.Count(12); left > 0 && in.ok(); --left) {
      Premise& premise = plan_.premises_.emplace_back();
      premise.storage = Storage(in);
      premise.layout = Layout(in, StorageNbytes(premise.storage));
      extras_.premise_digests.push_back(in.Fixed64());
    }
  }

  const SectionViews& sections_;
  const DTypeLookup& dtype_of_;
  PlanFile file_;
  LoadPlan& plan_ = file_.plan;
  PlanExtras& extras_ = file_.extras;
  std::vector<DType> dtypes_;
  absl::flat_hash_map<Index, Index> storages_;   // sizes
  absl::flat_hash_map<Index, Index> constants_;  // sizes
  std::vector<MapRow> geometry_;
  std::size_t num_writes_ = 0;
};

absl::StatusOr<PlanFile> DecodePlanFile(std::string_view bytes, const DTypeLookup& dtype_of) {
  const absl::StatusOr<SectionViews> sections = SplitSections(bytes);
  if (!sections.ok()) return sections.status();
  return PlanFileDecoder(*sections, dtype_of).Decode();
}

}  // namespace loadplan
