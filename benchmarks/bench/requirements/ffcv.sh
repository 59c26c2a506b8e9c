# Builds FFCV for the interpreter $1. Its sources come from PyPI; two things are changed: of OpenCV it gets only the two parts that
# it uses (the whole brings a hundred packages), by name, as there is no pkg-config file of them alone.
# Needs: apt-get install g++ pkg-config libopencv-imgproc-dev libturbojpeg0-dev
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for header in /usr/include/opencv4/opencv2/imgproc.hpp /usr/include/turbojpeg.h; do
    [ -e "$header" ] || { echo "$header isn't here: apt-get install g++ pkg-config libopencv-imgproc-dev libturbojpeg0-dev" >&2; exit 1; }
done
printf 'Name: opencv4\nDescription: its two parts\nVersion: 4\nCflags: -I/usr/include/opencv4\nLibs: -lopencv_imgproc -lopencv_core\n' > "$work"/opencv4.pc
export PKG_CONFIG_PATH=$work
"$python" -m pip download --quiet --no-deps --no-binary ffcv --no-build-isolation --dest "$work" ffcv==1.0.2
tar -C "$work" -xzf "$work"/ffcv-1.0.2.tar.gz
cd "$work"/ffcv-1.0.2
sed -i 's|#include <opencv2/opencv.hpp>|#include <opencv2/core.hpp>\n#include <opencv2/imgproc.hpp>|' libffcv/libffcv.cpp
"$python" -m pip install --quiet --no-deps --no-build-isolation .
