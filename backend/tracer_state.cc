#include "backend/tracer_state.h"

#include <algorithm>
#include <cctype>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "backend/loader_line.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

// `experts.12.w2.scale` -> `experts.#.w2.scale`: names that fail for the same reason.
std::string PatternOf(const std::string& name) {
  std::string pattern;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (digit && !pattern.empty() && pattern.back() == '#') continue;
    pattern.push_back(digit ? '#' : c);
  }
  return pattern;
}

// Names of one pattern that may fail one by one; after that the pattern is given up whole.
constexpr int kFailuresOfOnePattern = 2;

bool HasNames(const SymbolicMemory& memory, const RefusalRecord& refusal) {
  return std::ranges::any_of(refusal.inputs, [&](const ReadRecord& read) {
    return read.storage >= 0 &&
           !memory.NamesBehind(read.storage, read.layout.Span(), refusal.time).empty();
  });
}

}  // namespace

// Whether the name was not given up before.
bool Tracer::State::GiveUp(std::int32_t source, const std::string& reason) {
  if (!fallbacks.emplace(source, reason).second) return false;
  const std::string pattern = PatternOf(metas[static_cast<std::size_t>(source)].name);
  if (++failures[pattern] < kFailuresOfOnePattern) return true;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    if (PatternOf(metas[i].name) != pattern) continue;
    fallbacks.emplace(static_cast<std::int32_t>(i), reason);
  }
  return true;
}

// Gives up every name behind a refusal of the last pass; whether there was a new one.
bool Tracer::State::GiveUpRefused() {
  const RecordLog& log = last_session->log();
  bool found = false;
  const SymbolicMemory memory(log);
  const auto give_up = [&](const ReadRecord& read, Index time, const std::string& reason) {
    if (read.storage < 0) return;
    for (const std::int32_t name : memory.NamesBehind(read.storage, read.layout.Span(), time))
      found |= GiveUp(name, reason);
  };
  for (const RefusalRecord& refusal : log.refusals) {
    const std::string reason = refusal.reason + AtLine(refusal.where);
    const std::size_t before = fallbacks.size();
    for (const ReadRecord& read : refusal.inputs) give_up(read, refusal.time, reason);
    // Of a mirror or a live tensor that processes exchange: no name can be left out instead.
    if (fallbacks.size() == before && (!mirrors->empty() || refusal.may_concern_all) &&
        !HasNames(memory, refusal))
      LetAllFallBack(reason);
  }
  return found;
}

// Gives up the names behind what is `left`; all of them, where it is older than the pass or an
// operator fills it with bytes that no name stands behind. Whether there was a new one.
bool Tracer::State::GiveUpMirrored(const TraceSession& of, const std::vector<Mirror>& left) {
  const SymbolicMemory memory(of.log());
  const auto time = static_cast<Index>(of.log().copies.size());
  bool found = false;
  if (!of.unplannable().empty()) LetAllFallBack(of.unplannable());
  for (const Mirror& mirror : left) {
    const std::string where =
        absl::StrCat(mirror.what, " that is no target and outlives load_weights");
    absl::flat_hash_set<std::int32_t> names;
    for (const ReadRecord& copy : mirror.copies) {
      for (const std::int32_t name : memory.NamesBehind(copy.storage, copy.layout.Span(), time))
        names.insert(name);
    }
    for (const std::int32_t name : names)
      found |= GiveUp(name, absl::StrCat(mirror.writer, " takes it into ", where));
    // Of one that is made anew in each call, only what names put into it is looked at. Of an older
    // one nothing shows what the call with these names alone would leave there.
    if (mirror.is_born && (!names.empty() || !mirror.has_history)) continue;
    LetAllFallBack(absl::StrCat(mirror.writer, " changes ", where));
  }
  return found;
}

void Tracer::State::LetAllFallBack(const std::string& reason) {
  for (std::size_t i = 0; i < metas.size(); ++i)
    fallbacks.emplace(static_cast<std::int32_t>(i), reason);
  is_whole = is_explored = true;
}

// Names whose values were read only because others were there.
void Tracer::State::NoteRefusals(const TraceSession& explored) {
  const RecordLog& log = explored.log();
  const SymbolicMemory memory(log);
  for (const RefusalRecord& refusal : log.refusals) {
    const std::string reason = refusal.reason + AtLine(refusal.where);
    for (const ReadRecord& read : refusal.inputs) {
      if (read.storage < 0) continue;
      for (const std::int32_t name :
           memory.NamesBehind(read.storage, read.layout.Span(), refusal.time))
        fallbacks.emplace(name, reason);
    }
    if (refusal.may_concern_all && !HasNames(memory, refusal)) LetAllFallBack(reason);
  }
}

}  // namespace loadplan
