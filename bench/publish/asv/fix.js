"use strict";
// Added to asv's page by bench.publish, after its libraries and before it is ready.

// A page opened from disk may not fetch files, so publish puts them all in files.js.
if (location.protocol === "file:") {
    document.write('<script src="files.js"></' + "script>");
    jQuery.ajaxTransport("+*", function (options) {
        var name = decodeURIComponent(options.url.split("?")[0]);
        return {
            send: function (headers, complete) {
                var known = window.asvFiles && window.asvFiles.hasOwnProperty(name);
                // jQuery expects the answer later than the question
                setTimeout(function () {
                    if (known) {
                        complete(200, "OK", {text: JSON.stringify(window.asvFiles[name])});
                    } else {
                        complete(404, "Not Found");
                    }
                }, 0);
            },
            abort: function () {}
        };
    });
}

(function ($) {
    var draw = $.plot;

    function hasValue(point) {
        return point[1] !== null && point[1] !== undefined;
    }

    // flot-orderbars computes with the x values as given: from strings it gets NaN, and two or more
    // series of bars stay blank. Number the categories and name them by ticks instead.
    function numberCategories(series, options) {
        var names = [];
        series.forEach(function (one) {
            one.data.forEach(function (point) {
                if (names.indexOf(point[0]) < 0) {
                    names.push(point[0]);
                }
            });
        });
        series = series.map(function (one) {
            return $.extend({}, one, {
                // without the absent ones: moved beside the others, they come out as bars of zero
                data: one.data.filter(hasValue).map(function (point) {
                    return [names.indexOf(point[0]), point[1]];
                })
            });
        });
        options = $.extend(true, {}, options, {
            xaxis: {
                mode: null,
                min: -0.5,
                max: names.length - 0.5,
                ticks: names.map(function (name, at) { return [at, name]; })
            },
            // orderbars places bars by their left edges, once there are two
            series: {bars: {
                barWidth: 0.6 / series.length,
                align: series.length > 1 ? "left" : "center"
            }}
        });
        if (!options.yaxis.transform) {
            // asv cuts loss and error off below the least of them: a bar of no height
            $.extend(options.yaxis, {min: 0, max: null});
        }
        return [series, options];
    }

    $.plot = $.extend(function (place, series, options) {
        // the grid is a product, and a preset need not fill it: what was never run has no line
        var drawn = series.filter(function (one) { return one.data.some(hasValue); });
        if (drawn.length) {
            series = drawn;
        }
        if (options && options.xaxis && options.xaxis.mode === "categories") {
            [series, options] = numberCategories(series, options);
        }
        return draw.call(this, place, series, options);
    }, draw);
})(jQuery);
