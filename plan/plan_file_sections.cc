#include "plan/plan_file_sections.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "plan/byte_codec.h"
#include "plan/plan_file.h"

namespace loadplan {
namespace {

constexpr std::string_view kMagic = "LOADPLAN";
constexpr std::size_t kNameNbytes = 12;
// Version and number of sections; size of the file; checksum of what comes before it.
constexpr std::size_t kFixedNbytes = 8 + 4 + 4 + 8;
constexpr std::size_t kRowNbytes = kNameNbytes + 3 * 8;
constexpr std::size_t kHeaderNbytes = kFixedNbytes + kSectionNames.size() * kRowNbytes + 8;

absl::Status Damaged(std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the plan file is damaged: ", std::string(what), "; save the plan again"));
}

}  // namespace

std::string JoinSections(const SectionBytes& sections) {
  std::size_t size = kHeaderNbytes;
  for (const std::string& section : sections) size += section.size();
  ByteWriter out;
  out.Raw(kMagic);
  out.Fixed32(kPlanFormatVersion);
  out.Fixed32(static_cast<std::uint32_t>(sections.size()));
  out.Fixed64(size);
  std::size_t offset = kHeaderNbytes;
  for (std::size_t s = 0; s < sections.size(); ++s) {
    std::string name(kSectionNames[s]);
    name.resize(kNameNbytes, '\0');
    out.Raw(name);
    out.Fixed64(offset);
    out.Fixed64(sections[s].size());
    out.Fixed64(Checksum(sections[s]));
    offset += sections[s].size();
  }
  out.Fixed64(Checksum(out.bytes()));
  std::string bytes = out.Take();
  bytes.reserve(size);
  for (const std::string& section : sections) bytes += section;
  return bytes;
}

absl::StatusOr<SectionViews> SplitSections(std::string_view bytes) {
  if (bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(
        "this is no plan file: it does not begin with `LOADPLAN`; make one with `plan.save`");
  }
  if (bytes.size() < kFixedNbytes) return Damaged("it ends inside its header");
  ByteReader in(bytes.substr(kMagic.size()), "the header");
  const std::uint32_t version = in.Fixed32();
  if (version != kPlanFormatVersion) {
    return absl::InvalidArgumentError(absl::StrCat("the plan file has format version ", version,
                                                   ", and this library reads version ",
                                                   kPlanFormatVersion, "; plan again"));
  }
  const std::uint32_t count = in.Fixed32();
  const std::uint64_t size = in.Fixed64();
  if (size != bytes.size()) {
    return Damaged(absl::StrCat("it was written with ", size, " bytes and has ", bytes.size()));
  }
  if (count != kSectionNames.size() || size < kHeaderNbytes) {
    return Damaged(absl::StrCat("it has ", count, " sections, expected ", kSectionNames.size()));
  }
  ByteReader sum(bytes.substr(kHeaderNbytes - 8, 8), "the header");
  if (sum.Fixed64() != Checksum(bytes.substr(0, kHeaderNbytes - 8))) {
    return Damaged("the checksum of its header is wrong");
  }
  SectionViews views;
  std::uint64_t expected = kHeaderNbytes;
  for (std::size_t s = 0; s < kSectionNames.size(); ++s) {
    const std::string_view padded = in.Raw(kNameNbytes);
    const std::string_view name = padded.substr(0, padded.find('\0'));
    const std::uint64_t offset = in.Fixed64();
    const std::uint64_t nbytes = in.Fixed64();
    const std::uint64_t checksum = in.Fixed64();
    if (name != kSectionNames[s]) {
      return Damaged(absl::StrCat("section ", s, " is not `", std::string(kSectionNames[s]), "`"));
    }
    if (offset != expected || nbytes > size - offset) {
      return Damaged(absl::StrCat("section `", std::string(name), "` lies outside of it"));
    }
    views[s] = bytes.substr(offset, nbytes);
    expected += nbytes;
    if (Checksum(views[s]) != checksum) {
      return Damaged(absl::StrCat("the checksum of section `", std::string(name), "` is wrong"));
    }
  }
  if (expected != size) return Damaged("bytes are left over behind its last section");
  return views;
}

}  // namespace loadplan
