// A plan as the bytes of a file. What it writes, plan/plan_file_decode.cc reads, in the same order.
#include <span>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "plan/byte_codec.h"
#include "plan/plan_file.h"
#include "plan/plan_file_sections.h"

namespace loadplan {
namespace {

class PlanFileEncoder {
 public:
  PlanFileEncoder(const LoadPlan& plan, const PlanExtras& extras) : plan_(plan), extras_(extras) {}

  absl::StatusOr<std::string> Encode() {
    if (extras_.programs.size() != plan_.programs().size() ||
        extras_.premise_digests.size() != plan_.premises().size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a plan of ", plan_.programs().size(), " programs and ",
                       plan_.premises().size(), " premises came with ", extras_.programs.size(),
                       " operators and ", extras_.premise_digests.size(), " digests"));
    }
    About();
    Storages();
    Targets();
    Sources();
    Constants();
    Entries();
    Programs();
    Writes();
    Findings();
    // Last: the others have put rows into them.
    Rows(Section::kDTypes, num_dtypes_, dtypes_);
    Rows(Section::kGeometry, geometry_ids_.size(), geometry_);
    return JoinSections(sections_);
  }

 private:
  void Put(Section section, ByteWriter& out) {
    sections_[static_cast<std::size_t>(section)] = out.Take();
  }
  void Rows(Section section, std::size_t count, const ByteWriter& rows) {
    ByteWriter out;
    out.Count(count);
    out.Raw(rows.bytes());
    Put(section, out);
  }

  std::size_t DTypeId(const DType& dtype) {
    const auto [found, is_new] = dtype_ids_.emplace(dtype.code, num_dtypes_);
    if (is_new) {
      ++num_dtypes_;
      dtypes_.String(dtype.name);
      dtypes_.Count(static_cast<std::size_t>(dtype.itemsize));
    }
    return found->second;
  }

  std::size_t GeometryId(const WriteItem& item) {
    ByteWriter row;
    const StridedMap& map = item.map;
    row.Count(map.shape().size());
    for (std::size_t d = 0; d < map.shape().size(); ++d) {
      row.Signed(map.shape()[d]);
      row.Signed(map.to().byte_strides[d]);
      row.Signed(map.from().byte_strides[d]);
    }
    row.Signed(map.to().itemsize);
    row.Signed(map.from().itemsize);
    row.Count(item.casts.size());
    for (const CastStep& step : item.casts) {
      row.Count(2 * DTypeId(step.dtype) + (step.scattered ? 1 : 0));
    }
    const auto [found, is_new] = geometry_ids_.emplace(row.Take(), geometry_ids_.size());
    if (is_new) geometry_.Raw(found->first);
    return found->second;
  }

  static void Layout(ByteWriter& out, const StridedLayout& layout) {
    out.Signed(layout.byte_offset());
    out.Count(layout.shape().size());
    for (const Index extent : layout.shape()) out.Signed(extent);
    for (const Index stride : layout.byte_strides()) out.Signed(stride);
    out.Signed(layout.itemsize());
  }

  void Map(ByteWriter& out, const WriteItem& item) {
    out.Count(GeometryId(item));
    out.Signed(item.map.to().byte_offset);
    out.Signed(item.map.from().byte_offset);
  }

  void About() {
    const PlanFileInfo& info = extras_.info;
    ByteWriter out;
    for (const std::string* text : {&info.library_version, &info.torch_version, &info.processor,
                                    &info.tag, &info.placement}) {
      out.String(*text);
    }
    out.Count(info.rebound.size());
    for (const std::string& name : info.rebound) out.String(name);
    out.Double(info.plan_seconds);
    out.Double(plan_.trace_seconds);
    out.Double(plan_.build_seconds);
    out.Count(static_cast<std::size_t>(plan_.overlap_policy()));
    Put(Section::kAbout, out);
  }

  void Storages() {
    ByteWriter out;
    out.Count(extras_.storages.size());
    for (const SavedStorage& storage : extras_.storages) {
      out.Signed(storage.id);
      out.Signed(storage.nbytes);
      out.String(storage.device);
    }
    Put(Section::kStorages, out);
  }

  void Targets() {
    ByteWriter out;
    out.Count(plan_.targets().size());
    for (const TargetTensor& target : plan_.targets()) {
      out.String(target.name);
      out.Signed(target.storage);
      Layout(out, target.layout);
      out.Count(DTypeId(target.dtype));
    }
    Put(Section::kTargets, out);
  }

  void Sources() {
    ByteWriter out;
    out.Count(plan_.sources().size());
    for (const SourceTensor& source : plan_.sources()) {
      out.String(source.name);
      out.Count(source.shape.size());
      for (const Index extent : source.shape) out.Signed(extent);
      out.Count(DTypeId(source.dtype));
      out.Signed(source.storage);
    }
    Put(Section::kSources, out);
  }

  void Constants() {
    ByteWriter out;
    out.Count(extras_.constants.size());
    for (const SavedConstant& constant : extras_.constants) {
      out.Signed(constant.index);
      out.Signed(constant.nbytes);
      out.String(constant.blob);
    }
    Put(Section::kConstants, out);
  }

  void Entries() {
    // Many names have one reason.
    absl::flat_hash_map<std::string_view, std::size_t> ids;
    ByteWriter reasons;
    ByteWriter rows;
    for (const PlanEntry& entry : plan_.entries()) {
      const auto [found, is_new] = ids.emplace(entry.reason, ids.size());
      if (is_new) reasons.String(entry.reason);
      rows.Count(static_cast<std::size_t>(entry.kind));
      rows.Count(found->second);
      rows.Count(entry.num_writes);
    }
    ByteWriter out;
    out.Count(ids.size());
    out.Raw(reasons.bytes());
    out.Raw(rows.bytes());
    Put(Section::kEntries, out);
  }

  void Programs() {
    ByteWriter out;
    out.Count(plan_.programs().size());
    for (std::size_t p = 0; p < plan_.programs().size(); ++p) {
      const Program& program = plan_.programs()[p];
      out.Signed(program.node);
      out.String(program.op);
      out.Count(program.names.size());
      for (const std::int32_t name : program.names) out.Signed(name);
      out.Count(program.inputs.size());
      for (const ProgramInput& input : program.inputs) {
        Layout(out, input.layout);
        out.Count(DTypeId(input.dtype));
        out.Count(input.pieces.size());
        for (const WriteItem& piece : input.pieces) {
          FromAnywhere(out, piece.origin);
          Map(out, piece);
        }
      }
      const SavedProgram& saved = extras_.programs[p];
      out.Count(saved.result_nbytes.size());
      for (const Index nbytes : saved.result_nbytes) out.Signed(nbytes);
      out.String(saved.blob);
    }
    Put(Section::kPrograms, out);
  }

  static void FromAnywhere(ByteWriter& out, const Origin& origin) {
    out.Count(static_cast<std::size_t>(origin.kind));
    out.Signed(origin.index);
    out.Signed(origin.output);
  }

  void Writes() {
    ByteWriter out;
    for (const WriteItem& write : plan_.writes()) {  // whose is told by the entries
      out.Signed(write.target);
      Map(out, write);
    }
    for (const auto* const items :
         {&plan_.constants(), &plan_.live_copies(), &plan_.value_writes()}) {
      out.Count(items->size());
      for (const WriteItem& item : *items) {
        FromAnywhere(out, item.origin);
        out.Signed(item.target);
        Map(out, item);
      }
    }
    Put(Section::kWrites, out);
  }

  void Findings() {
    ByteWriter out;
    out.Count(plan_.overlaps().size());
    for (const NameOverlap& overlap : plan_.overlaps()) {
      out.Signed(overlap.first);
      out.Signed(overlap.second);
      out.Signed(overlap.storage);
      out.Signed(overlap.nbytes);
    }
    out.Count(plan_.uncovered().size());
    for (const UncoveredTarget& target : plan_.uncovered()) {
      out.Signed(target.target);
      out.Signed(target.nbytes);
      out.Signed(target.total_nbytes);
    }
    out.Count(plan_.premises().size());
    for (std::size_t i = 0; i < plan_.premises().size(); ++i) {
      const Premise& premise = plan_.premises()[i];
      out.Signed(premise.storage);
      Layout(out, premise.layout);
      out.Fixed64(extras_.premise_digests[i]);
    }
    Put(Section::kFindings, out);
  }

  const LoadPlan& plan_;
  const PlanExtras& extras_;
  SectionBytes sections_;
  absl::flat_hash_map<std::int8_t, std::size_t> dtype_ids_;
  std::size_t num_dtypes_ = 0;
  ByteWriter dtypes_;
  absl::flat_hash_map<std::string, std::size_t> geometry_ids_;
  ByteWriter geometry_;
};

}  // namespace

absl::StatusOr<std::string> EncodePlanFile(const LoadPlan& plan, const PlanExtras& extras) {
  return PlanFileEncoder(plan, extras).Encode();
}

}  // namespace loadplan
