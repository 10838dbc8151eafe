#include "transfer/geometry_table.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "backend/convert.h"

namespace loadplan {
namespace {

// Unsigned LEB128: seven bits a byte, low ones first.
void AppendNumber(std::uint64_t value, std::string& out) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

template <typename Int>
void Append(Int value, std::string& out) {
  AppendNumber(static_cast<std::uint64_t>(value), out);
}

// Reads what Append wrote. After the end, and after anything malformed, all numbers are 0 and `ok`
// is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  bool at_end() const { return position_ == bytes_.size(); }
  std::uint64_t Number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 63 && position_ < bytes_.size(); shift += 7) {
      const auto byte = static_cast<std::uint8_t>(bytes_[position_++]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    ok_ = false;
    return 0;
  }
  Index Signed() { return static_cast<Index>(Number()); }
  // Each counted item takes a byte at least, so that no count makes more memory than bytes came.
  std::size_t Count() {
    const std::uint64_t count = Number();
    if (count > bytes_.size() - position_) ok_ = false;
    return ok_ ? static_cast<std::size_t>(count) : 0;
  }
  std::string_view Bytes(std::size_t count) {
    if (count > bytes_.size() - position_) ok_ = false;
    if (!ok_) return {};
    position_ += count;
    return bytes_.substr(position_ - count, count);
  }

 private:
  std::string_view bytes_;
  std::size_t position_ = 0;
  bool ok_ = true;
};

absl::Status Malformed(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat(
      "another rank described its ", what,
      " in a form that this loadplan does not read; use one version of it on all ranks"));
}

void AppendGeometry(const TensorGeometry& geometry, std::string& out) {
  Append(geometry.dtype.code, out);
  Append(geometry.shape.size(), out);
  for (const Index extent : geometry.shape) Append(extent, out);
  Append(geometry.pieces.size(), out);
  for (const ShardPiece& piece : geometry.pieces) {
    Append(piece.rank, out);
    Append(piece.box.rank(), out);
    for (const Interval& interval : piece.box.intervals()) {
      Append(interval.start, out);
      Append(interval.extent(), out);
    }
  }
}

std::optional<TensorGeometry> ReadGeometry(Reader& reader) {
  TensorGeometry geometry;
  const std::uint64_t code = reader.Number();
  if (code >= static_cast<std::uint64_t>(at::ScalarType::NumOptions)) return std::nullopt;
  const auto type = static_cast<at::ScalarType>(code);
  if (type == at::ScalarType::Undefined) return std::nullopt;
  geometry.dtype = ToDType(type);
  geometry.shape.resize(reader.Count());
  Index numel = geometry.dtype.itemsize;
  for (Index& extent : geometry.shape) {
    extent = reader.Signed();
    const std::optional<Index> product = CheckedMultiply(numel, extent);
    if (!product.has_value()) return std::nullopt;
    numel = *product;
  }
  geometry.pieces.resize(reader.Count());
  for (ShardPiece& piece : geometry.pieces) {
    piece.rank = static_cast<std::int32_t>(reader.Number());
    absl::InlinedVector<Interval, 4> intervals(reader.Count());
    for (Interval& interval : intervals) {
      interval.start = reader.Signed();
      const std::optional<Index> stop = CheckedAdd(interval.start, reader.Signed());
      if (!stop.has_value()) return std::nullopt;
      interval.stop = *stop;
    }
    piece.box = Box(std::move(intervals));
  }
  if (!reader.ok()) return std::nullopt;
  return geometry;
}

// `a.b.c` as `a.`, `b.`, `c`.
std::vector<std::string_view> PartsOf(std::string_view name) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t dot = name.find('.');
    if (dot == std::string_view::npos) break;
    parts.push_back(name.substr(0, dot + 1));
    name.remove_prefix(dot + 1);
  }
  parts.push_back(name);
  return parts;
}

}  // namespace

Index TensorGeometry::nbytes() const {
  Index nbytes = dtype.itemsize;
  for (const Index extent : shape) nbytes *= extent;
  return nbytes;
}

std::string GeometryTable::EncodeNames(const Names& names) {
  absl::flat_hash_map<std::string_view, std::size_t> numbers;
  std::string dictionary;
  std::string body;
  std::vector<std::string_view> last;
  for (const std::string& name : names) {
    std::vector<std::string_view> parts = PartsOf(name);
    std::size_t same = 0;
    while (same < std::min(parts.size(), last.size()) && parts[same] == last[same]) ++same;
    Append(same, body);
    Append(parts.size() - same, body);
    for (std::size_t i = same; i < parts.size(); ++i) {
      const auto [found, is_new] = numbers.emplace(parts[i], numbers.size());
      if (is_new) {
        Append(parts[i].size(), dictionary);
        dictionary.append(parts[i]);
      }
      Append(found->second, body);
    }
    last = std::move(parts);
  }
  std::string out;
  Append(numbers.size(), out);
  out += dictionary;
  Append(names.size(), out);
  return out + body;
}

absl::StatusOr<std::shared_ptr<const GeometryTable::Names>> GeometryTable::DecodeNames(
    std::string_view bytes) {
  Reader reader(bytes);
  std::vector<std::string_view> dictionary(reader.Count());
  for (std::string_view& part : dictionary) part = reader.Bytes(reader.Count());
  Names names(reader.Count());
  std::vector<std::string_view> parts;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::uint64_t same = reader.Number();
    if (same > parts.size()) return Malformed("names");
    parts.resize(static_cast<std::size_t>(same));
    for (std::size_t left = reader.Count(); left > 0; --left) {
      const std::uint64_t number = reader.Number();
      if (number >= dictionary.size()) return Malformed("names");
      parts.push_back(dictionary[static_cast<std::size_t>(number)]);
    }
    for (const std::string_view part : parts) names[i].append(part);
    if (i > 0 && names[i] <= names[i - 1]) return Malformed("names");
  }
  if (!reader.ok() || !reader.at_end()) return Malformed("names");
  return std::make_shared<const Names>(std::move(names));
}

std::string GeometryTable::EncodeGeometries() const {
  std::string out;
  Append(geometries_.size(), out);
  for (const TensorGeometry& geometry : geometries_) AppendGeometry(geometry, out);
  for (const std::int32_t geometry : geometry_of_) Append(geometry, out);
  return out;
}

absl::StatusOr<GeometryTable> GeometryTable::Decode(std::shared_ptr<const Names> names,
                                                    std::string_view geometries) {
  Reader reader(geometries);
  GeometryTable table;
  table.geometries_.resize(reader.Count());
  for (TensorGeometry& geometry : table.geometries_) {
    std::optional<TensorGeometry> read = ReadGeometry(reader);
    if (!read.has_value()) return Malformed("tensors");
    geometry = *std::move(read);
  }
  table.geometry_of_.resize(names->size());
  for (std::int32_t& geometry : table.geometry_of_) {
    const std::uint64_t index = reader.Number();
    if (index >= table.geometries_.size()) return Malformed("tensors");
    geometry = static_cast<std::int32_t>(index);
  }
  if (!reader.ok() || !reader.at_end()) return Malformed("tensors");
  table.names_ = std::move(names);
  return table;
}

std::int32_t GeometryTableBuilder::AddGeometry(TensorGeometry geometry) {
  std::string encoding;
  AppendGeometry(geometry, encoding);
  const auto [found, is_new] =
      by_encoding_.emplace(std::move(encoding), static_cast<std::int32_t>(geometries_.size()));
  if (is_new) geometries_.push_back(std::move(geometry));
  return found->second;
}

absl::StatusOr<GeometryTable> GeometryTableBuilder::Build() && {
  std::ranges::sort(items_);
  GeometryTable table;
  GeometryTable::Names names;
  names.reserve(items_.size());
  for (auto& [name, geometry] : items_) {
    if (!names.empty() && names.back() == name) {
      return absl::InvalidArgumentError(absl::StrCat("`", name, "` is described twice"));
    }
    names.push_back(std::move(name));
    table.geometry_of_.push_back(geometry);
  }
  table.names_ = std::make_shared<const GeometryTable::Names>(std::move(names));
  table.geometries_ = std::move(geometries_);
  return table;
}

absl::Status CheckCovers(const GeometryTable& table) {
  std::vector<bool> is_checked(table.geometries().size(), false);
  for (std::size_t i = 0; i < table.names()->size(); ++i) {
    const auto index = static_cast<std::size_t>(table.geometry_of()[i]);
    if (is_checked[index]) continue;
    is_checked[index] = true;
    const TensorGeometry& geometry = table.geometries()[index];
    absl::Status status =
        DistinctBoxes((*table.names())[i], geometry.shape, geometry.pieces, /*must_cover=*/true)
            .status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<GeometryTable> NeededTable(const LoadPlan& plan, std::int32_t rank) {
  GeometryTableBuilder builder;
  for (std::size_t entry = 0; entry < plan.sources().size(); ++entry) {
    const SourceTensor& source = plan.sources()[entry];
    TensorGeometry geometry{source.shape, source.dtype, {}};
    for (Box& box : plan.Reads(static_cast<std::int32_t>(entry))) {
      geometry.pieces.push_back({rank, std::move(box)});
    }
    builder.Add(source.name, std::move(geometry));
  }
  return std::move(builder).Build();
}

}  // namespace loadplan
