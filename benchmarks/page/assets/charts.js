// SPDX-License-Identifier: Apache-2.0
// Charts as hand-made SVG. Every mark carries the id of the table row it shows (data-row).
'use strict';

(() => {
  const NS = 'http://www.w3.org/2000/svg';
  const MARGIN = {top: 8, right: 14, bottom: 38, left: 52};

  const svg = (name, attributes = {}, parent = null) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === 'text') node.textContent = value;
      else node.setAttribute(key, value);
    }
    if (parent) parent.append(node);
    return node;
  };

  const markPath = (shape, x, y, r) => {
    if (shape === 'square') {
      const s = r * 0.9;
      return `M${x - s},${y - s}h${2 * s}v${2 * s}h${-2 * s}z`;
    }
    if (shape === 'triangle') {
      return `M${x},${y - 1.15 * r}L${x + 1.1 * r},${y + 0.85 * r}L${x - 1.1 * r},${y + 0.85 * r}z`;
    }
    if (shape === 'diamond') {
      const s = 1.25 * r;
      return `M${x},${y - s}L${x + s},${y}L${x},${y + s}L${x - s},${y}z`;
    }
    return `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`;
  };

  const hook = (node, row, lines) => {
    node.setAttribute('class', `${node.getAttribute('class') || ''} mark`.trim());
    node.setAttribute('data-row', row.id);
    node.setAttribute('tabindex', '0');
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', lines.join(', '));
    const show = (event) => {
      const box = node.getBoundingClientRect();
      const x = event.clientX || box.left + box.width / 2;
      const y = event.clientY || box.top;
      Report.showTooltip(lines, x, y);
    };
    node.addEventListener('pointerenter', show);
    node.addEventListener('focus', show);
    node.addEventListener('pointerleave', Report.hideTooltip);
    node.addEventListener('blur', Report.hideTooltip);
  };

  const logTicks = (low, high, most) => {
    const all = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power++) {
      for (const step of [1, 2, 5]) all.push(step * 10 ** power);
    }
    let ticks = all.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    if (ticks.length > most) {
      ticks = ticks.filter((t) => /^1(0*)$|^0\.0*1$/.test(String(Number(t.toPrecision(3)))) || /^1e/.test(String(t)));
    }
    while (ticks.length > most) ticks = ticks.filter((_, index) => index % 2 === 0);
    // A narrow range holds too few of 1, 2, 5: take even steps, as on a linear axis.
    return ticks.length >= 3 ? ticks : linearTicks(high, Math.ceil(4 / (1 - low / high))).filter((t) => t >= low);
  };

  const linearTicks = (high, most) => {
    const raw = high / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const ticks = [];
    for (let i = 0; i * step <= high * 1.0001; i++) ticks.push(i * step);
    return ticks;
  };

  // Scales map a value to pixels; `kind` is 'log' or 'linear'.
  const scale = (kind, low, high, from, to) => {
    if (kind === 'log') {
      const [a, b] = [Math.log(low), Math.log(high)];
      return (value) => from + ((Math.log(value) - a) / (b - a || 1)) * (to - from);
    }
    return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  };

  const frame = (width, height, label) => svg('svg', {
    class: 'chart', viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': label,
  });

  const yAxis = (root, ticks, y, width, label) => {
    for (const tick of ticks) {
      svg('line', {class: 'grid', x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick)}, root);
      svg('text', {x: MARGIN.left - 6, y: y(tick) + 4, 'text-anchor': 'end', text: Report.tick(tick)}, root);
    }
    const middle = (MARGIN.top + y.bottom) / 2;
    svg('text', {
      class: 'axis-label', x: 12, y: middle, 'text-anchor': 'middle',
      transform: `rotate(-90 12 ${middle})`, text: label,
    }, root);
  };

  const xAxis = (root, ticks, x, bottom, width, label, text) => {
    svg('line', {class: 'baseline', x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom}, root);
    let last = -Infinity;
    for (const tick of ticks) {
      const at = x(tick);
      const words = text(tick);
      const space = 6.5 * words.length + 6;
      svg('line', {class: 'baseline', x1: at, x2: at, y1: bottom, y2: bottom + 4}, root);
      if (at - last < space) continue;
      last = at;
      svg('text', {x: at, y: bottom + 16, 'text-anchor': 'middle', text: words}, root);
    }
    svg('text', {
      class: 'axis-label', x: (MARGIN.left + width - MARGIN.right) / 2, y: bottom + 32,
      'text-anchor': 'middle', text: label,
    }, root);
  };

  // A chart of points, optionally joined to lines.
  //   series: [{name, color, shape, points: [{x, y, low, high, row, lines}]}]
  //   options: width, height, label, xLabel, yLabel, xKind, yKind, xTicks, xText, join,
  //            ceilings: [{ridge, peak, text}], rule: {y, text, color}, radius
  Report.pointChart = (series, options) => {
    const {width, height} = options;
    const root = frame(width, height, options.label);
    const bottom = height - MARGIN.bottom;
    const points = series.flatMap((s) => s.points);
    const xs = points.map((p) => p.x);
    const ys = points.flatMap((p) => [p.y, p.low, p.high].filter((v) => v > 0));
    const extra = options.rule ? [options.rule.y] : [];
    const ceilings = options.ceilings || [];
    // Where a ceiling bends is part of the picture, also when every point lies on one side of it.
    xs.push(...ceilings.map((c) => c.ridge / 3));
    const spread = (values, by) => [Math.min(...values) / by, Math.max(...values) * by];
    const [xLow, xHigh] = options.xKind === 'log' ? spread(xs, 1.15) : [Math.min(...xs) - 0.5, Math.max(...xs) + 0.5];
    const yAll = [...ys, ...extra];
    yAll.push(...ceilings.map((c) => c.peak));
    const [yLow, yHigh] = options.yKind === 'log' ? spread(yAll, 1.25) : [0, Math.max(...yAll) * 1.06];
    const x = scale(options.xKind, xLow, xHigh, MARGIN.left, width - MARGIN.right);
    const y = scale(options.yKind, yLow, yHigh, bottom, MARGIN.top);
    y.bottom = bottom;
    const yTicks = options.yKind === 'log' ? logTicks(yLow, yHigh, 7) : linearTicks(yHigh, 5);
    yAxis(root, yTicks, y, width, options.yLabel);
    const ticks = options.xTicks || logTicks(xLow, xHigh, 8);
    xAxis(root, ticks, x, bottom, width, options.xLabel, options.xText || Report.tick);
    for (const ceiling of ceilings) drawCeiling(root, ceiling, x, y, [xLow, xHigh], yLow);
    if (options.rule) {
      const at = y(options.rule.y);
      svg('line', {
        class: 'ceiling', x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at,
        style: options.rule.color ? `stroke:${options.rule.color}` : '',
      }, root);
      svg('text', {
        class: 'axis-label', x: options.rule.start ? MARGIN.left + 6 : width - MARGIN.right, y: at - 5,
        'text-anchor': options.rule.start ? 'start' : 'end', text: options.rule.text,
      }, root);
    }
    for (const one of series) drawSeries(root, one, x, y, options);
    return root;
  };

  // A roofline: proportional to x up to its ridge, flat at its peak beyond; from where it enters the picture.
  const drawCeiling = (root, {ridge, peak, text}, x, y, [xLow, xHigh], yLow) => {
    const start = Math.max(xLow, (yLow / peak) * ridge);
    const corners = [[start, Math.min(peak, (peak * start) / ridge)], [ridge, peak], [xHigh, peak]];
    const path = corners.map(([px, py], i) => `${i ? 'L' : 'M'}${x(px)},${y(py)}`).join('');
    svg('path', {class: 'ceiling', d: path}, root);
    svg('text', {class: 'axis-label', x: x(xHigh), y: y(peak) - 5, 'text-anchor': 'end', text}, root);
  };

  const drawSeries = (root, one, x, y, options) => {
    const radius = options.radius || 4;
    if (options.join && one.points.length > 1) {
      const sorted = [...one.points].sort((a, b) => a.x - b.x);
      const path = sorted.map((p, i) => `${i ? 'L' : 'M'}${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`).join('');
      svg('path', {class: 'series-line', d: path, style: `stroke:${one.color}`}, root);
    }
    for (const point of one.points) {
      if (point.low && point.high && point.high > point.low) {
        svg('line', {
          class: 'whisker', x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high),
          style: `stroke:${one.color}`,
        }, root);
      }
    }
    for (const point of one.points) {
      const node = svg('path', {
        d: markPath(one.shape, x(point.x), y(point.y), radius), style: `fill:${one.color}`,
      }, root);
      hook(node, point.row, point.lines);
    }
  };

  // Vertical bars in groups. groups: [{label, bars: [{color, value, low, high, row, lines}]}]
  Report.barChart = (groups, options) => {
    const {width, height} = options;
    const root = frame(width, height, options.label);
    const bottom = height - MARGIN.bottom;
    const highest = Math.max(...groups.flatMap((g) => g.bars.flatMap((b) => [b.value, b.high || 0])));
    const y = scale('linear', 0, highest * 1.05, bottom, MARGIN.top);
    y.bottom = bottom;
    yAxis(root, linearTicks(highest * 1.05, 5), y, width, options.yLabel);
    const room = (width - MARGIN.left - MARGIN.right) / groups.length;
    const x = (index) => MARGIN.left + (index + 0.5) * room;
    groups.forEach((group, index) => {
      const gap = 2;
      const thick = Math.min(26, (room * 0.8) / group.bars.length - gap);
      const start = x(index) - ((thick + gap) * group.bars.length - gap) / 2;
      group.bars.forEach((bar, place) => {
        const left = start + place * (thick + gap);
        const top = y(bar.value);
        const r = Math.min(3, thick / 2, bottom - top);
        const node = svg('path', {
          d: `M${left},${bottom}V${top + r}q0,${-r} ${r},${-r}h${thick - 2 * r}q${r},0 ${r},${r}V${bottom}z`,
          style: `fill:${bar.color}`,
        }, root);
        hook(node, bar.row, bar.lines);
        if (bar.low && bar.high > bar.low) {
          const middle = left + thick / 2;
          svg('line', {
            class: 'whisker', x1: middle, x2: middle, y1: y(bar.low), y2: y(bar.high), style: 'stroke:var(--ink)',
          }, root);
        }
      });
    });
    xAxis(root, groups.map((_, i) => i), x, bottom, width, options.xLabel, (i) => groups[i].label);
    return root;
  };

  // Horizontal bars of one quantity, with a lighter part that every bar has (inputs).
  // bars: [{name, color, value, part, text, row, lines}]
  Report.rowChart = (bars, options) => {
    const {width} = options;
    const step = 26;
    const left = 96;
    const height = bars.length * step + MARGIN.top + 34;
    const root = frame(width, height, options.label);
    const bottom = height - 34;
    const highest = Math.max(...bars.map((b) => b.value));
    const x = scale('linear', 0, highest, left, width - 74);
    for (const tick of linearTicks(highest, 4)) {
      svg('line', {class: 'grid', x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: bottom}, root);
      svg('text', {x: x(tick), y: bottom + 14, 'text-anchor': 'middle', text: Report.tick(tick)}, root);
    }
    svg('text', {class: 'axis-label', x: (left + width - 74) / 2, y: bottom + 29, 'text-anchor': 'middle', text: options.xLabel}, root);
    bars.forEach((bar, index) => {
      const top = MARGIN.top + index * step + 4;
      const thick = step - 8;
      svg('text', {class: 'axis-label', x: left - 8, y: top + thick / 2 + 4, 'text-anchor': 'end', text: bar.name}, root);
      const end = x(bar.value);
      const r = Math.min(3, (end - left) / 2);
      const node = svg('path', {
        d: `M${left},${top}H${end - r}q${r},0 ${r},${r}v${thick - 2 * r}q0,${r} ${-r},${r}H${left}z`,
        style: `fill:${bar.color}`,
      }, root);
      if (bar.part) {
        svg('rect', {
          x: left, y: top, width: Math.max(0, x(bar.part) - left), height: thick,
          style: 'fill:var(--card);opacity:0.55;pointer-events:none',
        }, root);
      }
      hook(node, bar.row, bar.lines);
      svg('text', {class: 'axis-label', x: end + 6, y: top + thick / 2 + 4, text: bar.text}, root);
    });
    svg('line', {class: 'baseline', x1: left, x2: left, y1: MARGIN.top, y2: bottom}, root);
    return root;
  };

  Report.legendEntry = (name, {color, shape}) => {
    const root = svg('svg', {width: 14, height: 14, viewBox: '0 0 14 14', 'aria-hidden': 'true'});
    svg('path', {d: markPath(shape, 7, 7, 5), style: `fill:${color}`}, root);
    return Report.element('span', {}, root, document.createTextNode(name));
  };
})();
