// LOADPLAN_API: what C++ hosts may call. Everything else stays hidden, so that a host's
// own Abseil, or a second library with the same names, cannot meet ours.
#ifndef LOADPLAN_GEOMETRY_EXPORT_H_
#define LOADPLAN_GEOMETRY_EXPORT_H_

#define LOADPLAN_API __attribute__((visibility("default")))

#endif  // LOADPLAN_GEOMETRY_EXPORT_H_
