// SPDX-License-Identifier: Apache-2.0
// One view per suite: which filters choose rows, which fields make the small charts, what is drawn.
'use strict';

(() => {
  const HEIGHT = 240;
  const yesNo = (value) => (value ? 'causal' : 'full');
  const FILTERS = {
    source: {label: 'source', get: (row) => Report.source(row), text: String},
    dtype: {label: 'dtype', get: (row) => row.dtype, text: String},
    mode: {label: 'mode', get: (row) => row.mode, text: String},
    head_dim: {label: 'head dim', get: (row) => row.head_dim, text: String},
    causal: {label: 'mask', get: (row) => Boolean(row.causal), text: yesNo},
    batch: {label: 'batch', get: (row) => row.batch, text: String},
    heads: {label: 'heads', get: (row) => `${row.hq}/${row.hkv}`, text: String},
    hq: {label: 'query heads', get: (row) => row.hq, text: String},
  };
  const FACETS = {
    mode: (row) => row.mode,
    causal: (row) => yesNo(row.causal),
    batch: (row) => `batch ${row.batch}`,
    lq: (row) => `Lq ${row.lq}`,
    lkv: (row) => `Lkv ${Report.count(row.lkv)}`,
    length: (row) => `L ${Report.count(row.lkv)}`,
    shape: (row) => (row.lq === row.lkv ? `L ${Report.count(row.lq)}` : `Lq ${row.lq}, Lkv ${Report.count(row.lkv)}`),
    heads: (row) => `${row.hq}/${row.hkv} heads`,
    source: (row) => Report.source(row),
    model_dim: (row) => `model dim ${row.model_dim}`,
  };

  const seriesName = (row, mixed) => (mixed ? `${row.impl} (${row.precision})` : row.impl);

  const timeLines = (row) => {
    const lines = [
      `${row.impl}: ${Report.milliseconds(row.median_ms)}`,
      Report.describe(row),
      `quartiles ${Report.number(row.q1_ms)} to ${Report.number(row.q3_ms)} ms, ${row.rounds} rounds`,
    ];
    if (row.tflops !== undefined) lines.push(`${Report.number(row.tflops)} TFLOP/s, ${Report.number(row.gb_s)} GB/s`);
    return lines;
  };

  const bySeries = (rows, mixed) => {
    const groups = new Map();
    for (const row of rows) {
      const name = seriesName(row, mixed);
      if (!groups.has(name)) groups.set(name, {name, ...Report.look(row.impl), impl: row.impl, rows: []});
      groups.get(name).rows.push(row);
    }
    return [...groups.values()].sort((a, b) => Report.bySeries(a.impl, b.impl) || Report.byValue(a.name, b.name));
  };

  // Two ways to show a time: in milliseconds, or over the fastest of the same problem.
  const SHOWS = ['time', 'over fastest'];
  const shown = (row, show) => {
    const unit = show === 'time' ? 1 : row.median_ms / row.versus;
    return {low: row.q1_ms / unit, value: row.median_ms / unit, high: row.q3_ms / unit};
  };
  const yLabel = (show) => (show === 'time' ? 'ms per call' : 'time over the fastest');

  const timePoint = (row, x, show) => {
    const {low, value, high} = shown(row, show);
    const lines = timeLines(row);
    if (row.versus) lines.push(`${Report.ratio(row.versus)} × the fastest`);
    return {x, y: value, low, high, row, lines};
  };

  // Time against a length, both axes logarithmic.
  const lengthChart = (field, xLabel) => (rows, title, width, mixed, show) => {
    const series = bySeries(rows, mixed).map((one) => ({...one, points: one.rows.map((row) => timePoint(row, row[field], show))}));
    return Report.pointChart(series, {
      width, height: HEIGHT, label: title, xLabel, yLabel: yLabel(show), xKind: 'log', yKind: 'log', join: true,
      xTicks: Report.unique(rows.map((row) => row[field])).sort(Report.byValue), xText: Report.count,
    });
  };

  // Time in bars, grouped by a field.
  const groupChart = (field, xLabel) => (rows, title, width, mixed, show) => {
    const groups = Report.unique(rows.map((row) => row[field])).sort(Report.byValue).map((value) => ({
      label: String(value),
      bars: bySeries(rows.filter((row) => row[field] === value), mixed).flatMap((one) => one.rows.map((row) => ({
        color: one.color, ...shown(row, show), row, lines: timePoint(row, 0, show).lines,
      }))),
    }));
    return Report.barChart(groups, {width, height: HEIGHT, label: title, xLabel, yLabel: yLabel(show)});
  };

  // Split count against time; the automatic choice stands right of the counts, with a dashed line across them
  // and its distance from the best.
  const splitChart = (rows, title, width) => {
    const counted = rows.filter((row) => typeof row.num_splits === 'number');
    const auto = rows.find((row) => row.num_splits === 'auto');
    const best = Math.min(...rows.map((row) => row.median_ms));
    const look = Report.look('splitkv');
    const series = [{...look, points: counted.map((row) => timePoint(row, row.num_splits, 'time'))}];
    const ticks = Report.unique(counted.map((row) => row.num_splits)).sort(Report.byValue);
    const options = {
      width, height: HEIGHT, label: title, xLabel: 'split count (1: no splitting)', yLabel: 'ms per call', xKind: 'log',
      yKind: 'linear', join: true, xTicks: ticks, xText: String,
    };
    if (auto) {
      const color = Report.look('jax_cudnn').color;
      options.rule = {y: auto.median_ms, text: `auto: ${Report.ratio(auto.median_ms / best)} × the best`, color};
      const place = ticks.length ? 2 * ticks[ticks.length - 1] : 1;
      options.xText = (value) => (value === place ? 'auto' : String(value));
      ticks.push(place);
      series.push({color, shape: 'diamond', points: [timePoint(auto, place, 'time')]});
    }
    return Report.pointChart(series, options);
  };

  const memoryChart = (rows, title, width) => {
    const bars = [...rows].sort((a, b) => Report.bySeries(a.impl, b.impl)).map((row) => ({
      name: row.impl, ...Report.look(row.impl), value: row.peak_mb, part: row.inputs_mb, row,
      text: Report.number(row.peak_mb),
      lines: [`${row.impl}: ${Report.number(row.peak_mb)} MiB`, Report.describe(row),
        `of which inputs ${Report.number(row.inputs_mb)} MiB`],
    }));
    return Report.rowChart(bars, {width, label: title, xLabel: 'peak MiB (pale part: inputs)'});
  };

  const longestChart = (rows, title, width) => {
    const bars = [...rows].sort((a, b) => Report.bySeries(a.impl, b.impl)).map((row) => ({
      name: row.impl, ...Report.look(row.impl), value: row.longest_seq, row, text: `${Report.count(row.longest_seq)} (${row.limit})`,
      lines: [`${row.impl}: ${row.longest_seq}`, `ended by: ${row.limit}`, row.note || ''],
    }));
    return Report.rowChart(bars, {width, label: title, xLabel: 'longest sequence'});
  };

  // Work per second against FLOP per byte, with the ceilings of the file where they were measured.
  const roofline = (rows, title, width, mixed) => {
    const series = bySeries(rows, mixed).map((one) => ({
      ...one,
      points: one.rows.map((row) => ({
        x: row.intensity, y: row.tflops, row, lines: [...timeLines(row), `${Report.number(row.intensity)} FLOP/byte`],
      })),
    }));
    const ceilings = [];
    const known = Report.data.files[rows[0].file].ceilings;
    for (const precision of known ? Report.unique(rows.map((row) => row.precision)) : []) {
      const gflops = known.gflops[precision];
      if (!gflops || !known.read_gb_s) continue;
      ceilings.push({
        ridge: gflops / known.read_gb_s, peak: gflops / 1e3,
        text: `${precision}: ${Report.number(gflops, 3)} GFLOP/s, read ${Report.number(known.read_gb_s, 3)} GB/s`,
      });
    }
    return Report.pointChart(series, {
      width, height: 380, label: title, xLabel: 'FLOP per byte that must move', yLabel: 'TFLOP/s', xKind: 'log', yKind: 'log',
      ceilings, radius: 3.5,
    });
  };

  const VIEWS = [
    {
      id: 'gqa', nav: 'GQA', title: 'Grouped-query self-attention', rows: (row) => row.suite === 'gqa',
      blurb: 'Time of one call by number of key/value heads. flex_native reads K and V once per group; flex_repeat repeats them first.',
      filters: ['source', 'dtype', 'hq', 'head_dim', 'causal', 'batch'], facets: ['mode', 'length'],
      chart: groupChart('hkv', 'key/value heads'), shows: true,
    },
    {
      id: 'dispatch', nav: 'Dispatch', title: 'Small and medium self-attention', rows: (row) => row.suite === 'dispatch',
      blurb: 'Time against length: what the free choice (default) costs beside every explicit one. Both axes are logarithmic.',
      filters: ['source', 'dtype', 'heads', 'head_dim', 'batch'], facets: ['mode', 'causal'],
      chart: lengthChart('lkv', 'sequence length'), shows: true,
    },
    {
      id: 'decode', nav: 'Decode', title: 'Decode', rows: (row) => row.suite === 'decode',
      blurb: 'A few new queries against a long cache. Time against cache length, both axes logarithmic.',
      filters: ['source', 'dtype', 'heads', 'head_dim', 'causal', 'mode'], facets: ['batch', 'lq'],
      chart: lengthChart('lkv', 'key/value length'), shows: true,
    },
    {
      id: 'splitsweep', nav: 'Splits', title: 'Split counts', rows: (row) => row.suite === 'splitsweep',
      blurb: 'Decode time against the number of parts that the keys are split into. '
        + 'The dashed line is the automatic choice, where it was measured.',
      filters: ['source', 'dtype', 'batch', 'heads', 'head_dim', 'causal', 'mode'], facets: ['lq', 'lkv'],
      chart: splitChart, ownLegend: true,
    },
    {
      id: 'blockk', nav: 'Tiles', title: 'Key tile sizes', rows: (row) => row.suite === 'blockk',
      blurb: 'Decode time by keys per tile.',
      filters: ['source', 'dtype', 'heads', 'head_dim', 'causal', 'mode'], facets: ['batch', 'lq', 'lkv'],
      chart: groupChart('block_k', 'keys per tile'),
    },
    {
      id: 'peak', nav: 'Memory', title: 'Peak memory', rows: (row) => row.suite === 'peak', value: 'peak_mb',
      blurb: 'Of one call in a process of its own, inputs included.',
      filters: ['source', 'dtype', 'head_dim', 'causal'], facets: ['mode', 'batch', 'shape', 'heads'],
      chart: memoryChart, ownLegend: true, size: 'broad',
    },
    {
      id: 'max_seq', nav: 'Longest', title: 'Longest sequence', rows: (row) => row.suite === 'max_seq', value: 'longest_seq',
      blurb: 'The longest self-attention that ran before memory, time or the bound of the search ended it.',
      filters: ['source', 'dtype', 'head_dim', 'batch'], facets: ['mode', 'causal', 'heads'],
      chart: longestChart, ownLegend: true, size: 'broad',
    },
    {
      id: 'layer', nav: 'Layer', title: 'Attention layer', rows: (row) => row.suite === 'layer',
      blurb: 'A multi-head layer with its projections; fwd_bwd is a training step\'s forward and backward pass.',
      filters: ['source', 'dtype', 'heads', 'causal', 'batch'], facets: ['mode', 'model_dim'],
      chart: lengthChart('lkv', 'sequence length'), shows: true,
    },
    {
      id: 'roofline', nav: 'Roofline', title: 'Roofline', rows: (row) => row.tflops !== undefined, size: 'wide',
      blurb: 'Work per second against arithmetic intensity: FLOPs of the allowed pairs over bytes of each array once, '
        + 'all suites of a source. Dashed: what the machine reached in the same run, where that was measured.',
      filters: ['source', 'dtype'], facets: ['source'], chart: roofline,
    },
  ];

  const choose = (rows, filters, state) => {
    const choices = [];
    let left = rows;
    for (const key of filters) {
      const filter = FILTERS[key];
      const values = Report.unique(left.map(filter.get));
      // Sources stay in the order of the files, so that the first file given is shown first.
      if (key !== 'source') values.sort(Report.byValue);
      if (!values.includes(state[key])) state[key] = values[0];
      choices.push({key, filter, values});
      left = left.filter((row) => filter.get(row) === state[key]);
    }
    return [left, choices];
  };

  const withDistance = (rows, facet) => {
    const best = new Map();
    const key = (row) => [...facet.map((name) => FACETS[name](row)), row.lq, row.lkv, row.hkv].join('|');
    const timed = rows.filter((row) => row.median_ms !== undefined);
    for (const row of timed) best.set(key(row), Math.min(row.median_ms, best.get(key(row)) || Infinity));
    const compared = (row) => row.median_ms !== undefined && row.suite !== 'max_seq';
    return rows.map((row) => (compared(row) ? {...row, versus: row.median_ms / best.get(key(row))} : row));
  };

  // Facets and tables in the order of modes and sizes.
  const byShape = (a, b) => {
    for (const name of ['mode', 'batch', 'lq', 'lkv', 'hq', 'hkv', 'head_dim', 'causal']) {
      const order = Report.byValue(a[name], b[name]);
      if (order) return order;
    }
    return Report.bySeries(a.impl, b.impl);
  };

  // Builds a view's section and redraws it on every choice and every change of width.
  const section = (view, rows) => {
    const state = {show: SHOWS[0]};
    const value = view.value || 'median_ms';
    const controls = Report.element('div', {class: 'controls'});
    const legend = Report.element('div', {class: 'legend'});
    const charts = Report.element('div', {class: `charts ${view.size || ''}`.trim()});
    const table = Report.element('div');
    const root = Report.element('section', {id: view.id},
      Report.element('h2', {text: view.title}), Report.element('p', {class: 'blurb', text: view.blurb}),
      controls, legend, charts, table);

    const draw = () => {
      const [left, choices] = choose(rows, view.filters, state);
      controls.replaceChildren(...choices.filter((choice) => choice.values.length > 1).map((choice) => Report.control(
        choice.filter.label, choice.values, state[choice.key], choice.filter.text,
        (picked) => { state[choice.key] = picked; draw(); },
      )));
      if (view.shows) {
        controls.append(Report.control('show', SHOWS, state.show, String, (picked) => { state.show = picked; draw(); }));
      }
      const drawn = withDistance(left.filter((row) => row[value] !== undefined), view.facets).sort(byShape);
      const mixed = Report.unique(drawn.map((row) => row.precision)).length > 1;
      legend.replaceChildren(...(view.ownLegend ? [] : bySeries(drawn, mixed).map((one) => Report.legendEntry(one.name, one))));
      drawCharts(drawn, mixed);
      table.replaceChildren(Report.tableDetails(drawn, Report.COLUMNS));
    };

    const drawCharts = (drawn, mixed) => {
      const facets = new Map();
      const titles = drawn.map((row) => view.facets.map((name) => FACETS[name](row)).join(' · '));
      // Runs that measured the same case get charts of their own: one line through both would be nobody's.
      const runs = new Map();
      drawn.forEach((row, index) => {
        const same = `${titles[index]}|${row.impl}|${row.precision}|${Report.describe(row)}`;
        if (!runs.has(same)) runs.set(same, new Set());
        runs.get(same).add(row.run);
      });
      const several = new Set([...runs].filter(([, some]) => some.size > 1).map(([same]) => same.split('|')[0]));
      drawn.forEach((row, index) => {
        const title = several.has(titles[index]) ? `${titles[index]} · ${row.run}` : titles[index];
        if (!facets.has(title)) facets.set(title, []);
        facets.get(title).push(row);
      });
      const cards = [...facets.keys()].map((title) => Report.element('div', {class: 'card'},
        Report.element('p', {class: 'chart-title', text: title})));
      charts.replaceChildren(...cards);
      if (!cards.length) charts.append(Report.element('p', {class: 'empty', text: 'Nothing was measured for this choice.'}));
      [...facets.values()].forEach((some, index) => {
        const width = Math.max(260, cards[index].clientWidth - 32);
        cards[index].append(view.chart(some, cards[index].firstChild.textContent, width, mixed, state.show));
      });
    };
    return {root, draw};
  };

  Report.control = (label, values, current, text, pick) => {
    const group = Report.element('div', {class: 'control', role: 'group', 'aria-label': label}, Report.element('span', {text: label}));
    for (const value of values) {
      group.append(Report.element('button', {
        type: 'button', 'aria-pressed': String(value === current), text: text(value), onclick: () => pick(value),
      }));
    }
    return group;
  };

  Report.views = (rows) => VIEWS.map((view) => [view, rows.filter((row) => view.rows(row) && row.error === undefined)])
    .filter(([, some]) => some.length)
    .map(([view, some]) => ({title: view.nav, id: view.id, ...section(view, some)}));
})();
