// CMake wants one source of its own for a library that is made of other targets' objects.
